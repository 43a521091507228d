"""The pages, one module each. Importing this package registers them with Dash."""

from importlib import import_module
from pkgutil import iter_modules

for _page in iter_modules(__path__, f"{__name__}."):
    import_module(_page.name)
