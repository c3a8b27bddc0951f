from fp8ctl.cli.app import main

main()
