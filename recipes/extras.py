"""Packages that only some runs need."""

import importlib
import importlib.util
from types import ModuleType


def is_installed(package: str) -> bool:
    """Whether it can be imported, and is no directory that only has its name."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


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
