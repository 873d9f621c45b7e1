"""Packages that only some runs need."""

import importlib
from types import ModuleType


def load_extra(module: str, otherwise: str) -> ModuleType:
    """Imports a module of the extra `recipes`.

    Args:
        module: whose first part is the package.
        otherwise: what a setting must be without it, and what it is: of the error.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ValueError(f"{otherwise}. Install it: pip install {package}.") from None
