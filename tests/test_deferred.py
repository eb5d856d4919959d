"""Deferred classes and patterns behave as the standard library's: the same definitions, made by both."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, get_type_hints

import pytest

from ckpttool.core import deferred
from tests.conftest import ROOT

T = TypeVar("T")
compile_now = re.compile
Decorator = Callable[..., Any]


def define(dataclass: Decorator) -> SimpleNamespace:
    """Return classes with everything that the package's records use."""

    @dataclass(frozen=True, slots=True)
    class Plain:
        """A record."""

        name: str
        size: int = 3
        parts: tuple[str, ...] = ()
        facts: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
        limit: ClassVar[int] = 7

        @property
        def double(self) -> int:
            return 2 * self.size

    @dataclass(frozen=True, slots=True)
    class Derived(Plain):
        extra: int = 5

    @dataclass(frozen=True, slots=True, eq=False)
    class Identity:
        name: str

    @dataclass(slots=True)
    class Changing:
        name: str
        tags: list[str] = field(default_factory=list)
        total: int = field(default=4, init=False)
        visited: set[int] = field(default_factory=set, init=False)
        later: int = field(init=False)

        def __post_init__(self) -> None:
            self.later = self.total + 1

    @dataclass
    class Open:
        name: str
        count: int = field(default=2, init=False)

    @dataclass(frozen=True)
    class Cached:
        name: str

        def __post_init__(self) -> None:
            object.__setattr__(self, "name", self.name.upper())

    @dataclass(slots=True, eq=False, kw_only=True)
    class Keywords:
        name: str
        size: int = 1

    @dataclass(frozen=True, slots=True)
    class OneKeyword:
        last: int = field(kw_only=True)
        name: str = "a"

    @dataclass(frozen=True, slots=True)
    class Own:
        name: str

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and other.name.lower() == self.name.lower()

        def __hash__(self) -> int:
            return hash(self.name.lower())

        def __repr__(self) -> str:
            return "own"

    @dataclass(frozen=True, slots=True)
    class Equal:
        name: str

        def __eq__(self, other: object) -> bool:
            return True

    @dataclass(frozen=True, slots=True)
    class Typed(Generic[T]):
        value: T

    @dataclass(frozen=True)
    class Held(Mapping[str, int]):
        values_: dict[str, int]

        def __getitem__(self, key: str) -> int:
            return self.values_[key]

        def __iter__(self) -> Iterator[str]:
            return iter(self.values_)

        def __len__(self) -> int:
            return len(self.values_)

    @dataclass(frozen=True, slots=True)
    class Empty:
        pass

    @dataclass(frozen=True, slots=True, repr=False)
    class Silent:
        name: str

    return SimpleNamespace(**{name: value for name, value in locals().items() if isinstance(value, type)})


OURS, THEIRS = define(deferred.dataclass), define(dataclasses.dataclass)
CLASSES = sorted(vars(OURS))
for _classes in (OURS, THEIRS):  # where pickle looks for a class
    for _name, _class in vars(_classes).items():
        _class.__qualname__ = f"{'OURS' if _classes is OURS else 'THEIRS'}.{_name}"
# Arguments that some of the classes take; those they refuse are compared too.
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    (("a",), {}),
    (("b", 5), {}),
    (("a", 3, ("x",)), {}),
    (("a", 3, ("x",), {"k": 1}, 9), {}),
    ((), {"name": "a"}),
    ((), {"name": "a", "size": 9}),
    ((), {"last": 1}),
    ((), {"last": 1, "name": "b"}),
    (({"k": 1},), {}),
    ((), {"wrong": 1}),
]


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result with the name of the namespace removed, or the type of the error."""
    try:
        result = call()
    except Exception as error:  # noqa: BLE001  # whatever the standard library raises
        return type(error)
    return result.replace("OURS.", "").replace("THEIRS.", "") if isinstance(result, str) else result


def both(name: str, call: Callable[[type], Any]) -> None:
    assert outcome(lambda: call(getattr(OURS, name))) == outcome(lambda: call(getattr(THEIRS, name)))


@pytest.mark.parametrize("name", CLASSES)
class TestSame:
    @pytest.mark.parametrize(("arguments", "keywords"), CALLS)
    def test_values(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        def state(cls: type) -> Any:
            record = cls(*arguments, **keywords)
            return [(item.name, getattr(record, item.name)) for item in dataclasses.fields(record)]  # type: ignore[arg-type]

        both(name, state)
        both(
            name, lambda cls: repr(cls(*arguments, **keywords)) if cls.__repr__ is not object.__repr__ else ""
        )
        both(name, lambda cls: hash(cls(*arguments, **keywords)) is not None)
        both(name, lambda cls: dataclasses.asdict(cls(*arguments, **keywords)))

    def test_comparison(self, name: str) -> None:
        for first, first_words in CALLS:
            for second, second_words in CALLS[:8]:
                both(name, lambda cls: cls(*first, **first_words) == cls(*second, **second_words))  # noqa: B023
                both(
                    name,
                    lambda cls: len({cls(*first, **first_words), cls(*second, **second_words)}),  # noqa: B023
                )
            both(name, lambda cls: cls(*first, **first_words) == object())  # noqa: B023

    @pytest.mark.parametrize("attribute", ["name", "size", "value", "unknown"])
    @pytest.mark.parametrize("change", [lambda *at: setattr(*at, 1), delattr])
    def test_assignment(self, name: str, attribute: str, change: Callable[..., None]) -> None:
        for arguments, keywords in CALLS:

            def refusal(cls: type) -> bool:
                record = cls(*arguments, **keywords)  # noqa: B023
                try:
                    change(record, attribute)
                except dataclasses.FrozenInstanceError:
                    return True
                except TypeError:  # the standard library's, of a frozen class with slots in Python 3.11
                    assert cls is getattr(THEIRS, name)
                    return True
                except AttributeError:
                    return False
                return False

            both(name, refusal)

    def test_copies(self, name: str) -> None:
        for arguments, keywords in CALLS:

            def equal(cls: type) -> list[Any]:
                record = cls(*arguments, **keywords)  # noqa: B023
                copies = (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record)))
                names = [item.name for item in dataclasses.fields(record)]  # type: ignore[arg-type]
                return [[getattr(item, name) for name in names] for item in copies]

            both(name, equal)
            both(name, lambda cls: dataclasses.replace(cls(*arguments, **keywords), name="z").name)  # type: ignore[type-var]  # noqa: B023

    def test_description(self, name: str) -> None:
        both(name, lambda cls: str(inspect.signature(cls)))
        both(name, lambda cls: cls.__match_args__)  # type: ignore[attr-defined]
        both(name, lambda cls: cls.__dict__.get("__slots__"))
        both(name, lambda cls: (cls.__name__, cls.__module__, cls.__annotations__))
        both(name, lambda cls: [(f.name, f.type, f.default, f.init) for f in dataclasses.fields(cls)])  # type: ignore[arg-type]
        both(name, lambda cls: hasattr(cls.__new__(cls), "__dict__"))


def test_a_subclass_that_is_no_record_uses_its_constructor() -> None:
    for classes in (OURS, THEIRS):

        class Child(classes.Changing):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__("child")
                self.more = 1

        assert (Child().name, Child().later, Child().more) == ("child", 5, 1)


def test_two_threads_may_need_the_constructor_at_once() -> None:
    @deferred.dataclass(frozen=True, slots=True)
    class Row:
        name: str

    waiting = vars(Row)["__init__"]  # a thread has found it before another one puts the function in its place
    assert Row("first").name == "first"
    record = Row.__new__(Row)
    waiting.__get__(record, Row)("second")
    assert record.name == "second"


def test_a_record_that_contains_itself_is_described() -> None:
    for classes in (OURS, THEIRS):
        record = classes.Open("a")
        record.name = record
        assert "..." in repr(record)


def define_tuples(base: Any) -> SimpleNamespace:
    class Plain(base):
        """A row."""

        name: str
        size: int = 3
        parts: tuple[str, ...] = ()
        LIMIT = 7

        @property
        def double(self) -> int:
            return 2 * self.size

        def named(self) -> dict[str, Any]:
            return self._asdict()

        @classmethod
        def make(cls, name: str) -> Any:
            return cls(name, 9)

        def __repr__(self) -> str:
            return f"<{self.name}>"

    class Bare(base):
        left: int
        right: Plain

    return SimpleNamespace(Plain=Plain, Bare=Bare)


OUR_TUPLES, THEIR_TUPLES = define_tuples(deferred.NamedTuple), define_tuples(NamedTuple)
for _classes in (OUR_TUPLES, THEIR_TUPLES):
    for _name, _class in vars(_classes).items():
        _class.__qualname__ = f"{'OUR' if _classes is OUR_TUPLES else 'THEIR'}_TUPLES.{_name}"


@pytest.mark.parametrize("name", ["Plain", "Bare"])
@pytest.mark.parametrize(("arguments", "keywords"), CALLS)
def test_named_tuples(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    def describe(cls: Any) -> Any:
        row = cls(*arguments, **keywords)
        return [
            *(tuple(row), repr(row), hash(row[:1]), row._asdict(), row._replace(**{row._fields[0]: "z"})[0]),
            *(tuple(copy.deepcopy(row)), tuple(pickle.loads(pickle.dumps(row))), row == tuple(row)),
            *((row.double, row.named(), cls.make("m").size, cls.LIMIT) if name == "Plain" else ()),
        ]

    own, expected = (outcome(lambda: describe(getattr(item, name))) for item in (OUR_TUPLES, THEIR_TUPLES))  # noqa: B023
    assert own == expected


@pytest.mark.parametrize("name", ["Plain", "Bare"])
def test_named_tuples_are_described(name: str) -> None:
    def describe(cls: Any) -> Any:
        parameters = [(param.name, param.default) for param in inspect.signature(cls).parameters.values()]
        types = get_type_hints(cls, {"Plain": int}) if name == "Bare" else get_type_hints(cls)
        return [
            cls._fields,
            cls._field_defaults,
            cls.__match_args__,
            cls.__doc__,
            cls.__module__,
            parameters,
            types,
        ]

    assert describe(getattr(OUR_TUPLES, name)) == describe(getattr(THEIR_TUPLES, name))


def test_a_pattern_is_compiled_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(
        re, "compile", lambda text, flags=0: compiled.append(text) or compile_now(text, flags)
    )
    pattern = deferred.compile("(a)B", re.IGNORECASE)
    assert not compiled
    assert [pattern.sub("x", "ab AB c"), pattern.sub("x", "ab")] == ["x x c", "x"]
    assert compiled == ["(a)B"]
    assert (pattern.pattern, pattern.groups, repr(pattern)) == (
        "(a)B",
        1,
        repr(compile_now("(a)B", re.IGNORECASE)),
    )
    copied = copy.deepcopy(pattern).fullmatch("ab")
    assert copied is not None
    assert copied[1] == "a"
    with pytest.raises(re.error):
        deferred.compile("(").match("")


EAGER = """
import pkgutil, re, sys, ckpttool
from ckpttool.core import deferred
count = 0
def compile(expression, flags=0):
    global count
    count += 1
    return re.compile(expression, flags)
deferred.compile = compile
FRAMEWORKS = ("gymnasium", "jax", "keras", "onnx", "onnxruntime", "ray", "tensorflow", "torch")
sys.modules.update(dict.fromkeys(FRAMEWORKS))  # their import fails
for module in pkgutil.walk_packages(ckpttool.__path__, "ckpttool."):
    if not module.name.endswith("__main__"):
        try:
            __import__(module.name)
        except ImportError as error:
            assert error.name.partition(".")[0] in FRAMEWORKS, error
print(count)
"""


def test_every_pattern_of_the_package_is_a_regular_expression() -> None:
    done = subprocess.run([sys.executable, "-c", EAGER], capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(done.stdout) > 200
