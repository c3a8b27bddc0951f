"""TransformerEngine: whether it imports, and which recipes its own checks let through."""

from __future__ import annotations

from fp8ctl.doctor.finding import Answer, in_words, version

_FIX = "pip install 'fp8ctl[te]' on a machine with CUDA (optional; backend native needs it not)"


def answer() -> Answer:
    """Its version and recipes; one finding for whatever is broken about it."""
    installed = version("transformer_engine")
    if installed is None:
        return Answer("absent", "not installed", _FIX)
    from fp8ctl.config.schema import RecipeConfig
    from fp8ctl.fp8.te import import_te, te_obstacle

    try:
        import_te()
    except Exception as e:
        return Answer("broken", f"{installed} does not import: {in_words(e)}", _FIX)
    recipes = {
        "block": RecipeConfig(),
        "tensor": RecipeConfig(granularity="tensor"),
        "tensor_delayed": RecipeConfig(granularity="tensor_delayed", scale="fp32", grad_format="e5m2"),
        "mxfp8": RecipeConfig(granularity="mxfp8"),
    }
    obstacles = {name: te_obstacle(recipe, "cuda") for name, recipe in recipes.items()}
    runs = [name for name, why in obstacles.items() if why is None]
    if not runs:
        return Answer("broken", f"{installed} imports, but runs no recipe: {obstacles['block']}", _FIX)
    lacks = "; ".join(f"no {name}: {why}" for name, why in obstacles.items() if why)
    return Answer("ok", f"{installed}: {', '.join(runs)}" + (f"; {lacks}" if lacks else ""))
