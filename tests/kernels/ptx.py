"""Runs a compiled kernel on the CPU: its PTX becomes a Python function over numpy arrays (for on_ptx.py).

A line or two of Python for each instruction. A register is an array over the threads of a program (ptx_threads.py), of
unsigned integers that instructions view as they need, or of bools; global addresses are those of this process. Programs
run one after another, their threads side by side.

Cannot see: races, because a barrier has nothing to do; rounding of log2 and exp2, which are exact here; an address
outside of all tensors. All threads must branch alike, as they do in Triton's code.

It knows the instructions of our kernels, for sm_80 to sm_100 by Triton 3.6 to 3.8. For another instruction it raises an
error that names it: add it below, from NVIDIA's description of the PTX ISA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import ptx_threads as instructions
from ptx_threads import Threads

REGISTERS = {"p": "bool", "rs": "uint16", "r": "uint32", "rd": "uint64"}  # the type of each kind of register
SPECIAL = {"%tid.x": "t.tid", "%ctaid.x": "program", "%nctaid.x": "programs", "global_smem": "np.uint32(0)"}
COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
EXPRESSIONS = {  # the value of an instruction, from its operands
    "add": "{0} + {1}", "sub": "{0} - {1}", "div": "divide({0}, {1})", "fma": "fma({0}, {1}, {2})", "neg": "-{0}",
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}", "abs": "np.abs({0})",
    "sqrt": "np.sqrt({0})", "ex2": "np.exp2({0})", "popc": "count_ones({0})", "prmt": "permute({0}, {1}, {2})",
}  # fmt: skip


class Program:
    """One compiled kernel, whose programs have `number` threads and `shared` bytes of shared memory."""

    def __init__(self, ptx: str, number: int, shared: int) -> None:
        entry = re.search(r"\.entry\s+(\w+)\((.*?)\)[^{]*\n\{(.*?)\n\}", ptx, re.DOTALL)
        assert entry is not None
        self.number, self.shared = number, shared
        self.parameters = re.findall(r"\.param\s+\.(\w+)\s.*?(\w+_param_\d+)", entry[2])
        names = {"np": np, **vars(instructions)}
        exec(compile(_translated(entry[3]), entry[1], "exec"), names)
        self._run: Callable[..., None] = names["run"]

    def run(self, programs: int, values: Sequence[int | float]) -> None:
        """Run the programs. Pointers are given as addresses; arguments that are not given, at the end, are 0."""
        given = [*values, *[0] * (len(self.parameters) - len(values))]
        arguments = {}
        for (kind, name), value in zip(self.parameters, given, strict=True):
            number = int(np.float32(value).view("uint32")) if isinstance(value, float) else value
            arguments[name] = np.array([number % (1 << _bits(kind))], f"uint{_bits(kind)}")
        with np.errstate(all="ignore"):
            for program in range(programs):
                t = Threads(self.number, self.shared)
                self._run(t, arguments, np.array([program], "uint32"), np.array([programs], "uint32"))


def _translated(body: str) -> str:
    """Source of run(t, arguments, program, programs): blocks of instructions, one after another or jumped to."""
    blocks: dict[str, list[str]] = {"": []}
    for statement in _statements(body):
        if statement.endswith(":"):
            blocks[statement[:-1]] = []
            continue
        next(reversed(blocks.values())).append(statement)
        if re.match(r"(@\S+ )?bra", statement):
            blocks[f"after {len(blocks)}"] = []
    numbers = {label: number for number, label in enumerate(blocks)}
    lines = ["def run(t, arguments, program, programs):", "  block = 0"]
    for register in sorted(set(re.findall(r"%(?:p|rs?|rd)\d+", body))):
        lines.append(f"  {register[1:]} = t.zeros('{_type_of(register)}')")
    lines.append("  while True:")
    for number, statements in enumerate(blocks.values()):
        lines.append(f"    if block == {number}:")
        for statement in statements:
            lines += [f"      {line}" for line in _instruction(statement, numbers)]
        lines.append(f"      block = {number + 1}")
    return "\n".join([*lines, f"    if block == {len(blocks)}: return"])


def _statements(body: str) -> list[str]:
    """Instructions and labels, without declarations and the braces of inline assembly."""
    lines = (line.split("//")[0].strip() for line in body.splitlines())
    text = "\n".join(line for line in lines if not re.match(r"\.(loc|file|section|pragma)", line))
    found = (re.sub(r"\s+", " ", part.lstrip("{} \n\t").rstrip()) for part in re.split(r";|(?<=:)\n", text))
    return [statement for statement in found if statement and not statement.startswith(".reg")]


def _instruction(statement: str, blocks: dict[str, int]) -> list[str]:
    guarded = re.match(r"@(!?)%(p\d+) (.*)", statement)
    guard = "t.everyone"
    if guarded:
        guard, statement = f"{'~' if guarded[1] else ''}{guarded[2]}", guarded[3]
    name, _, rest = statement.partition(" ")
    operands = [operand.strip() for operand in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s{}[\]]+", rest)]
    operation, *modifiers = name.split(".")
    if operation == "ret":
        return ["return"]
    if operation == "bar":
        return ["pass"]
    if operation == "bra":
        return [f"if t.alike({guard}): block = {blocks[operands[0]]}; continue"]
    try:
        return OPERATIONS.get(operation, _expression)(operation, modifiers, operands, guard)
    except (KeyError, ValueError, AssertionError) as error:
        raise NotImplementedError(f"ptx.py does not know {statement!r} ({error!r})") from error


# --- operands ---


def _bits(kind: str) -> int:
    return int(re.sub(r"\D", "", kind))


def _type(kind: str) -> str:
    """numpy's name of a type; of two floats in one register, that of each."""
    if kind == "pred":
        return "bool"
    kind = kind.removesuffix("x2")
    return {"b": "uint", "u": "uint", "s": "int", "f": "float"}[kind[0]] + kind[1:]


def _type_of(register: str) -> str:
    found = re.match(r"%([a-z]+)\d", register)
    assert found, register
    return REGISTERS[found[1]]


def _value(operand: str, kind: str) -> str:
    """An operand in a type of numpy's."""
    if operand in SPECIAL:
        return f"{SPECIAL[operand]}.astype('{kind}')"
    if operand.startswith("%"):
        have = _type_of(operand)
        if kind == have:
            return operand[1:]
        cut = "" if _bits(kind) == _bits(have) or kind == "float32" else f".astype('uint{_bits(kind)}')"
        return f"{operand[1:]}{cut}.view('{kind}')"
    number = int(operand[2:], 16) if operand.startswith("0f") else int(operand.rstrip("U"), 0)
    if kind == "bool":
        return f"np.bool_({number != 0})"
    return f"np.uint{_bits(kind)}({number % (1 << _bits(kind))}).view('{kind}')"


def _set(register: str, value: str, guard: str) -> str:
    name, whole = register[1:], f"t.whole({value}, '{_type_of(register)}')"
    return f"{name} = {whole}" if guard == "t.everyone" else f"{name} = np.where({guard}, {whole}, {name})"


def _several(operand: str) -> list[str]:
    return [one.strip() for one in operand.strip("{} ").split(",")]


def _address(operand: str) -> str:
    base, _, offset = (part.strip() for part in operand.strip("[] ").partition("+"))
    value = SPECIAL[base] if base in SPECIAL else base[1:]
    return f"(t.whole({value}, 'int64') + {int(offset or '0', 0)})"


# --- instructions: (operation, modifiers, operands, guard) to lines of Python ---


def _expression(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    kind = _type(modifiers[-1])
    return [
        _set(operands[0], EXPRESSIONS[operation].format(*(_value(operand, kind) for operand in operands[1:])), guard)
    ]


def _move(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    (target, source), kind = operands, _type(modifiers[0])
    parts = _several(source if source.startswith("{") else target)
    part = f"uint{_bits(kind) // len(parts)}" if kind != "bool" else kind
    if source.startswith("{"):
        joined = (f"({_value(p, part)}.astype('{kind}') << np.{kind}({i * _bits(part)}))" for i, p in enumerate(parts))
        return [_set(target, " | ".join(joined), guard)]
    if target.startswith("{"):
        cut = [f"({_value(source, kind)} >> np.{kind}({i * _bits(part)})).astype('{part}')" for i in range(len(parts))]
        return [_set(p, value, guard) for p, value in zip(parts, cut, strict=True) if p != "_"]
    return [_set(target, _value(source, kind), guard)]


def _load(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    kind, registers = _type(modifiers[-1]), _several(operands[0])
    if modifiers[0] == "param":
        return [_set(operands[0], f"arguments['{operands[1].strip('[] ')}'].view('{kind}')", guard)]
    where = "_shared" if modifiers[0].startswith("shared") else ""
    found = f"found = t.load{where}({_address(operands[1])}, {guard}, '{kind}', {len(registers)})"
    return [found, *(_set(register, f"found[{i}]", guard) for i, register in enumerate(registers))]


def _store(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    kind, where = _type(modifiers[-1]), "_shared" if modifiers[0].startswith("shared") else ""
    values = ", ".join(f"t.whole({_value(operand, kind)}, '{kind}')" for operand in _several(operands[1]))
    return [f"t.store{where}({_address(operands[0])}, {guard}, '{kind}', [{values}])"]


def _add_atomically(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    assert modifiers[0] == "global" and modifiers[-2:] == ["add", "u32"]
    before = f"t.add_global({_address(operands[1])}, {guard}, {_value(operands[2], 'uint32')})"
    return [_set(operands[0], before, guard)]


def _compare(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    """A comparison that ends in `u` is also true if one operand is NaN."""
    name, kind = modifiers[0], _type(modifiers[-1])
    left, right = (_value(operand, kind) for operand in operands[1:])
    found, nan = f"({left} {COMPARE[name.removesuffix('u')]} {right})", f"(np.isnan({left}) | np.isnan({right}))"
    if name not in COMPARE:
        found = f"{found} | {nan}"
    elif name == "ne" and kind.startswith("float"):
        found = f"{found} & ~{nan}"
    return [_set(operands[0], found, guard)]


def _select(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    one, other = (_value(operand, _type(modifiers[0])) for operand in operands[1:3])
    return [_set(operands[0], f"np.where({operands[3][1:]}, {one}, {other})", guard)]


def _convert(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    *rounding, to, kind = modifiers
    target, *sources = operands
    if kind == "bf16":
        value = f"{_value(sources[0], 'uint16')}.astype('uint32') << np.uint32(16)"
    elif to.startswith(("bf16", "f16")):
        found = [f"to_{to.removesuffix('x2')}({_value(source, 'float32')}).astype('uint32')" for source in sources]
        value = " | ".join([*(f"({high} << np.uint32(16))" for high in found[:-1]), found[-1]])
    elif kind.startswith("f") and not to.startswith("f"):
        assert rounding == ["rzi"]
        value = f"saturate(np.trunc({_value(sources[0], _type(kind))}), '{_type(to)}')"
    else:
        value = f"{_value(sources[0], _type(kind))}.astype('{_type(to)}')"
    return [_set(target, value, guard)]


def _multiply(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    kind = _type(modifiers[-1])
    wide = kind.replace(str(_bits(kind)), str(2 * _bits(kind)))
    values = [_value(operand, kind) for operand in operands[1:3]]
    if modifiers[0] in ("wide", "hi"):
        assert _bits(kind) == 32
        values = [f"{value}.astype('{wide}')" for value in values]
    product = " * ".join(values)
    if modifiers[0] == "hi":
        product = f"(({product}) >> np.{wide}(32)).astype('{kind}')"
    if operation == "mad":
        product += f" + {_value(operands[3], wide if modifiers[0] == 'wide' else kind)}"
    return [_set(operands[0], product, guard)]


def _extreme(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    kind = _type(modifiers[-1])
    function = f"np.f{operation}" if kind.startswith("float") else f"np.{operation}imum"  # of x and NaN it is x
    return [_set(operands[0], f"{function}({', '.join(_value(operand, kind) for operand in operands[1:])})", guard)]


def _shift(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    function = {"shl": "shift_left", "shr": "shift_right"}[operation]
    value = f"{function}({_value(operands[1], _type(modifiers[0]))}, {_value(operands[2], 'uint32')})"
    return [_set(operands[0], value, guard)]


def _bit_field(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    kind, begin, length = _type(modifiers[0]), int(operands[2]), int(operands[3])
    up, down = _bits(kind) - length - begin, _bits(kind) - length
    return [_set(operands[0], f"({_value(operands[1], kind)} << np.{kind}({up})) >> np.{kind}({down})", guard)]


def _exchange(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    assert operands[3:] == ["0" if modifiers[1] == "up" else "31", "-1"]
    values, lane = (_value(operand, "uint32") for operand in operands[1:3])
    return [_set(operands[0], f"t.{modifiers[1]}({values}, {lane})", guard)]


def _reduce(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    return [_set(operands[0], f"t.reduce({_value(operands[1], _type(modifiers[-1]))}, '{modifiers[1]}')", guard)]


def _load_matrices(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    found = (f"t.load_matrix(at, {i}, {'trans' in modifiers})" for i in range(4))
    registers = zip(_several(operands[0]), found, strict=False)
    return [f"at = {_address(operands[1])}", *(_set(register, value, guard) for register, value in registers)]


def _store_matrices(operation: str, modifiers: list[str], operands: list[str], guard: str) -> list[str]:
    registers = enumerate(_several(operands[1]))
    stored = (f"t.store_matrix(at, {i}, {'trans' in modifiers}, {_value(r, 'uint32')})" for i, r in registers)
    return [f"at = {_address(operands[0])}", *stored]


OPERATIONS = {
    "mov": _move, "ld": _load, "st": _store, "atom": _add_atomically, "setp": _compare, "selp": _select,
    "cvt": _convert, "mul": _multiply, "mad": _multiply, "min": _extreme, "max": _extreme, "shl": _shift,
    "shr": _shift, "bfe": _bit_field, "shfl": _exchange, "redux": _reduce, "ldmatrix": _load_matrices,
    "stmatrix": _store_matrices,
}  # fmt: skip
