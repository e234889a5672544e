"""PTX text to instructions: scopes, labels, registers, parameters, shared symbols, line info.

Grammar: PTX ISA manual, chapters 4 (syntax), 5 (state spaces and types) and 11 (directives).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tilewright.emulator.errors import InvalidPtx, Place, expect

SIZES = {
    "pred": 1,
    "b8": 8,
    "u8": 8,
    "s8": 8,
    "b16": 16,
    "u16": 16,
    "s16": 16,
    "f16": 16,
    "b32": 32,
    "u32": 32,
    "s32": 32,
    "f32": 32,
    "b64": 64,
    "u64": 64,
    "s64": 64,
    "f64": 64,
    "b128": 128,
    "bf16": 16,
    "f16x2": 32,
    "bf16x2": 32,
}


@dataclass(frozen=True)
class Register:
    """Row `index` of the register file of `width` bits (1 for predicates)."""

    width: int
    index: int


@dataclass(frozen=True)
class Immediate:
    """An integer, or the bits of a float literal of `width` bits (0 for an integer)."""

    bits: int
    width: int = 0


@dataclass(frozen=True)
class Special:
    """A read-only register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A parameter, shared variable or label."""

    name: str


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}"""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """[base + offset], and for tensor copies the coordinates: [base, {x, y}]."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Pair:
    """d|p: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """!p"""

    operand: Operand


@dataclass(frozen=True)
class Sink:
    """_: a destination that is not wanted."""


Operand = Register | Immediate | Special | Symbol | Vector | Address | Pair | Not | Sink


@dataclass
class Instruction:
    """One PTX instruction; `target` is the instruction index that a branch label means."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    guard_negated: bool
    place: Place
    target: int = -1

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")


@dataclass(frozen=True)
class Variable:
    """A .param, .shared or .local declaration. `size` in bytes; 0 for extern shared."""

    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """One .entry. Offsets of `shared` and `local` count from the start of their space."""

    name: str
    target: str
    params: dict[str, Variable] = field(default_factory=dict)
    shared: dict[str, Variable] = field(default_factory=dict)
    local: dict[str, Variable] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    registers: dict[int, int] = field(default_factory=dict)  # width -> how many
    max_threads: int = 0

    @property
    def static_shared(self) -> int:
        return max((v.offset + v.size for v in self.shared.values()), default=0)

    @property
    def local_bytes(self) -> int:
        return max((v.offset + v.size for v in self.local.values()), default=0)


def parse(text: str) -> dict[str, Kernel]:
    """All kernels of a PTX module by name. Raises InvalidPtx where the text is not PTX."""
    return _Module(text).kernels


@dataclass
class _Scope:
    parent: _Scope | None
    registers: dict[str, Register] = field(default_factory=dict)
    families: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # width, base, count
    labels: dict[str, int] = field(default_factory=dict)

    def chain(self) -> Iterator[_Scope]:
        scope: _Scope | None = self
        while scope:
            yield scope
            scope = scope.parent

    def register(self, name: str) -> Register | None:
        family = re.fullmatch(r"(.*?)(\d+)", name)
        for scope in self.chain():
            if name in scope.registers:
                return scope.registers[name]
            if family and family[1] in scope.families:
                width, base, count = scope.families[family[1]]
                if int(family[2]) < count:
                    return Register(width, base + int(family[2]))
        return None


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_TOKEN = re.compile(
    r"\s*(?:(?P<brace>[{}])"
    r"|(?P<loc>\.loc\s+(?P<file>\d+)\s+(?P<row>\d+)[^\n]*)"
    r'|(?P<filedef>\.file\s+(?P<number>\d+)\s+"(?P<path>[^"]*)"[^\n]*)'
    r"|(?P<header>\.(?:version|target|address_size)\s+(?P<value>[^\n]*))"
    r"|(?P<entry>(?:\.visible\s+)?\.entry\s+(?P<name>[\w$]+)\s*\((?P<params>[^)]*)\)(?P<perf>[^{]*)\{)"
    r"|(?P<section>\.section\s+\S+\s*\{.*?\n\s*\})"
    r"|(?P<label>[\w$%]+)\s*:(?!:)"
    r"|(?P<statement>[^;]+);)",
    re.S,
)
_VARIABLE = re.compile(
    r"\.(?P<space>param|shared|local|global|const)\s+(?:\.align\s+(?P<align>\d+)\s+)?"
    r"(?:\.ptr\s+)?(?:\.align\s+\d+\s+)?\.(?P<type>\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)*(?:\.align\s+\d+\s+)?)?"
    r"(?P<name>[\w$]+)(?:\[(?P<count>\d*)\])?"
)


class _Module:
    def __init__(self, text: str):
        # Comments become spaces of the same shape so that positions keep their line numbers.
        self.text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
        self.files: dict[str, str] = {}
        self.target = ""
        self.kernels: dict[str, Kernel] = {}
        self.kernel: Kernel | None = None
        self.scope: _Scope | None = None
        self.module_shared: dict[str, Variable] = {}
        self.pending: list[tuple[Instruction, _Scope]] = []
        self.source: str | None = None
        self.line = 1
        self._read()

    def _read(self) -> None:
        position = 0
        while token := _TOKEN.match(self.text, position):
            self.line += self.text.count("\n", position, token.start(token.lastgroup or 0))
            self._token(token)
            self.line += self.text.count("\n", token.start(token.lastgroup or 0), token.end())
            position = token.end()
        if self.text[position:].strip() or self.scope:
            raise InvalidPtx(f"PTX line {self.line}: cannot parse {self.text[position:][:80]!r}")
        if not self.kernels:
            raise InvalidPtx("the PTX text holds no .entry")

    def _token(self, token: re.Match[str]) -> None:
        kind = next(
            k
            for k in ("brace", "loc", "filedef", "header", "entry", "section", "label", "statement")
            if token[k] is not None
        )
        if kind == "brace":
            self._brace(token["brace"])
        elif kind == "loc":
            self.source = f"{self.files.get(token['file'], '?')}:{token['row']}"
        elif kind == "filedef":
            self.files[token["number"]] = token["path"]
        elif kind == "header" and token["header"].startswith(".target"):
            self.target = token["value"].split(",")[0].strip()
        elif kind == "entry":
            self._entry(token)
        elif kind == "label":
            scope, kernel = self._inside()
            scope.labels[token["label"]] = len(kernel.instructions)
        elif kind == "statement":
            self._statement(token["statement"].strip())

    def _entry(self, token: re.Match[str]) -> None:
        self.kernel = Kernel(token["name"], self.target, shared=dict(self.module_shared))
        for declaration in filter(None, (p.strip() for p in token["params"].split(","))):
            self._declare(declaration, self.kernel.params)
        if threads := re.search(r"\.(?:reqntid|maxntid)\s+([\d, ]+)", token["perf"]):
            self.kernel.max_threads = 1
            for extent in threads[1].split(","):
                self.kernel.max_threads *= int(extent)
        self.scope = _Scope(None)

    def _brace(self, brace: str) -> None:
        if brace == "{":
            self.scope = _Scope(self.scope)
            return
        scope, kernel = self._inside()
        self.scope = scope.parent
        if self.scope is None:
            self._resolve_labels()
            self.kernels[kernel.name] = kernel
            self.kernel = None

    def _inside(self) -> tuple[_Scope, Kernel]:
        if self.scope is None or self.kernel is None:
            raise InvalidPtx(f"PTX line {self.line}: stands outside of a kernel")
        return self.scope, self.kernel

    def _resolve_labels(self) -> None:
        for instruction, scope in self.pending:
            name = expect(instruction.operands[0], Symbol)
            for level in scope.chain():
                if name.name in level.labels:
                    instruction.target = level.labels[name.name]
                    break
            else:
                raise InvalidPtx(f"label {name.name} is not defined", instruction.place)
        self.pending.clear()

    def _declare(self, declaration: str, table: dict[str, Variable]) -> None:
        match = _VARIABLE.search(declaration)
        if not match:
            raise InvalidPtx(f"PTX line {self.line}: cannot parse the variable {declaration!r}")
        element = SIZES[match["type"]] // 8
        size = element * int(match["count"] or 0) if match["count"] is not None else element
        align = int(match["align"] or element)
        end = max((v.offset + v.size for v in table.values()), default=0)
        table[match["name"]] = Variable(match["name"], -(-end // align) * align, size)

    def _statement(self, statement: str) -> None:
        if statement.startswith(".reg"):
            self._declare_registers(statement)
        elif statement.startswith((".shared", ".extern", ".visible .shared")):
            table = self.kernel.shared if self.kernel else self.module_shared
            self._declare(statement, table)
        elif statement.startswith(".local"):
            self._declare(statement, self._inside()[1].local)
        elif not statement.startswith((".pragma", ".global", ".const", ".weak")):
            self._instruction(statement)

    def _declare_registers(self, statement: str) -> None:
        scope, kernel = self._inside()
        match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S)
        if not match or match[1] not in SIZES:
            raise InvalidPtx(f"PTX line {self.line}: cannot parse {statement!r}")
        width = max(SIZES[match[1]], 16) if match[1] != "pred" else 1
        counts = kernel.registers
        for name in (n.strip() for n in match[2].split(",")):
            base = counts.get(width, 0)
            if family := re.fullmatch(r"(.*)<(\d+)>", name):
                scope.families[family[1]] = (width, base, int(family[2]))
                counts[width] = base + int(family[2])
            else:
                scope.registers[name] = Register(width, base)
                counts[width] = base + 1

    def _instruction(self, statement: str) -> None:
        scope, kernel = self._inside()
        place = Place(self.line, " ".join(statement.split()), self.source)
        match = re.fullmatch(r"(?:@(!?)([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.S)
        if not match:
            raise InvalidPtx("cannot parse this statement", place)
        guard = scope.register(match[2]) if match[2] else None
        if match[2] and guard is None:
            raise InvalidPtx(f"predicate {match[2]} is not declared", place)
        operands = tuple(self._operand(o, place) for o in _split(match[4]))
        instruction = Instruction(match[3], operands, guard, match[1] == "!", place)
        if instruction.parts[0] == "bra":
            self.pending.append((instruction, scope))
        kernel.instructions.append(instruction)

    def _operand(self, text: str, place: Place) -> Operand:
        if text.startswith("["):
            return self._address(text[1:-1], place)
        if text.startswith("{"):
            return Vector(tuple(self._operand(o, place) for o in _split(text[1:-1])))
        if text.startswith("!"):
            return Not(self._operand(text[1:].strip(), place))
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip(), place), self._operand(second.strip(), place))
        if text == "_":
            return Sink()
        if register := self._inside()[0].register(text):
            return register
        if text.startswith("%"):
            return Special(text[1:])
        return _literal(text) or Symbol(text)

    def _address(self, text: str, place: Place) -> Address:
        base, *rest = _split(text) or [""]
        coordinates: tuple[Operand, ...] = ()
        for extra in rest:
            operand = self._operand(extra, place)
            coordinates += operand.items if isinstance(operand, Vector) else (operand,)
        match = re.fullmatch(r"(.+?)\s*(?:\+\s*(-?\w+))?", base)
        if not match:
            raise InvalidPtx(f"cannot parse the address [{text}]", place)
        offset = int(match[2], 0) if match[2] else 0
        return Address(self._operand(match[1], place), offset, coordinates)


def _literal(text: str) -> Immediate | None:
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return Immediate(int(match[1], 16), 32)
    if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        return Immediate(int(match[1], 16), 64)
    if match := re.fullmatch(r"(-?(?:0x[0-9a-fA-F]+|0b[01]+|\d+))U?", text):
        return Immediate(int(match[1], 0))
    return None


def _split(text: str) -> list[str]:
    """Operands between the commas that stand outside every bracket."""
    pieces, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            pieces.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*pieces, last] if last else pieces
