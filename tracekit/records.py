"""Frozen dataclasses that cost next to nothing until they are used.

`dataclasses.dataclass` writes and compiles six functions for every frozen class, most of which nobody calls: half a
millisecond to one for each class, and a report needs a hundred of them. Here all classes share their functions, and
`__init__` is compiled with the first instance. All else is as there: `fields`, `replace`, `asdict` and `match` work,
instances compare, hash, print, copy and pickle by their fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses
    from collections.abc import Callable, Sequence
    from reprlib import recursive_repr
    from typing import Any

    def dataclass(
        cls: type | None = None, /, *, frozen: bool = False, slots: bool = False, **others: bool
    ) -> type | Callable[[type], type]:
        """As `dataclasses.dataclass`, which makes the classes that change or have an order."""
        if cls is not None or not frozen or others:
            return dataclasses.dataclass(cls, frozen=frozen, slots=slots, **others)

        def decorate(plain: type) -> type:
            own = set(vars(plain))
            made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(plain)
            made.__compared__ = tuple(field.name for field in dataclasses.fields(made) if field.compare)

            def first_init(self: Any, *args: Any, **kwargs: Any) -> None:
                made.__init__ = _init(made)
                made.__init__(self, *args, **kwargs)

            for name, function in {"__init__": first_init, **_SHARED, **(_OF_SLOTS if slots else {})}.items():
                if name not in own:
                    setattr(made, name, function)
            return made

        return decorate

    def _init(cls: type) -> Callable[..., None]:
        """Compile `__init__` of a class."""
        known = {"_set": object.__setattr__, "_not_given": dataclasses.MISSING}
        parameters, body = ["self"], []
        for field in dataclasses.fields(cls):
            name = value = field.name
            if field.default is not dataclasses.MISSING:
                known[f"_default_{name}"] = field.default
                parameters.append(f"{name}=_default_{name}")
            elif field.default_factory is not dataclasses.MISSING:
                known[f"_make_{name}"] = field.default_factory
                parameters.append(f"{name}=_not_given")
                value = f"_make_{name}() if {name} is _not_given else {name}"
            else:
                parameters.append(name)
            body.append(f" _set(self, {name!r}, {value})")
        if hasattr(cls, "__post_init__"):
            body.append(" self.__post_init__()")
        source = f"def __init__({', '.join(parameters)}):\n" + ("\n".join(body) or " pass")
        exec(source, known)  # noqa: S102 - nothing but names of fields, as in dataclasses
        init = known["__init__"]
        init.__qualname__ = f"{cls.__qualname__}.__init__"
        return init

    @recursive_repr()
    def _repr(self: Any) -> str:
        shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def _compared(self: Any) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in self.__compared__])

    def _eq(self: Any, other: object) -> bool:
        return _compared(self) == _compared(other) if type(other) is type(self) else NotImplemented

    def _hash(self: Any) -> int:
        return hash(_compared(self))

    def _setattr(_self: Any, name: str, _value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def _delattr(_self: Any, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def _getstate(self: Any) -> Sequence[Any]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def _setstate(self: Any, state: Sequence[Any]) -> None:
        for field, value in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, field.name, value)

    _SHARED = {
        "__repr__": _repr,
        "__eq__": _eq,
        "__hash__": _hash,
        "__setattr__": _setattr,
        "__delattr__": _delattr,
    }
    _OF_SLOTS = {"__getstate__": _getstate, "__setstate__": _setstate}
