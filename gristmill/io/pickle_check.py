"""Check of a pickle before it is loaded: its lengths, its memo and its nesting, by running it with types alone.

pickle.Unpickler trusts these: six bytes make it allocate a memo of 64 GB, and a deep tuple in a set overflows the
stack. Only the opcodes that picklers write in protocols 2 to 5 for containers, strings, numbers and the results of
functions are accepted.
"""

import pickletools
from mmap import mmap

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel

MAX_DEPTH = 100  # of tuples inside tuples: hashing one recurses
_ACCEPTED = {
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1",
    "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8", "EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1",
    "TUPLE2", "TUPLE3", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS", "FROZENSET", "BINGET",
    "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
}  # fmt: skip
_ARGUMENT, _POPS, _PUSHES, _TO_MARK, _ACTION = range(5)  # columns of the table of opcodes
_NOTHING, _FRAME, _STOP, _MARK, _TUPLE, _GET, _PUT, _GLOBAL, _REDUCE, _BUILD, _FILL = range(11)  # actions
_LINES, _REFUSED = -1, -9  # arguments: two lines; −2 … −5 as in pickletools: a length of 1, 4, 4 or 8 bytes, and data
_FUNCTION = 128  # flag of a value that GLOBAL made; the lower bits are the depth of a tuple
_DAMAGED, _ENDLESS, _LONG, _MEMO, _DEEP, _CALL = range(1, 7)
PROBLEMS = {
    _DAMAGED: "it is damaged, or holds other things than containers, numbers and strings",
    _ENDLESS: "it ends too early",
    _LONG: "it says that it is longer than it is",
    _MEMO: "it refers to values that are not in it",
    _DEEP: f"it has more than {MAX_DEPTH} tuples inside each other",
    _CALL: "it calls or changes something that is not one of its functions",
}


def find_problem(data: bytes | mmap) -> str | None:
    """What is wrong with a pickle, or None if it can be given to pickle.Unpickler."""
    code = _run(np.frombuffer(data, np.uint8), _TABLE)
    return PROBLEMS[code] if code else None


def _table() -> NDArray[np.int8]:
    """Argument, values popped and pushed, whether down to a mark, and action, for each of 256 opcodes."""
    actions = {
        "STOP": _STOP, "MARK": _MARK, "TUPLE": _TUPLE, "TUPLE1": _TUPLE, "TUPLE2": _TUPLE, "TUPLE3": _TUPLE,
        "BINGET": _GET, "LONG_BINGET": _GET, "BINPUT": _PUT, "LONG_BINPUT": _PUT, "MEMOIZE": _PUT, "GLOBAL": _GLOBAL,
        "STACK_GLOBAL": _GLOBAL, "REDUCE": _REDUCE, "BUILD": _BUILD,
        "APPEND": _FILL, "APPENDS": _FILL, "SETITEM": _FILL, "SETITEMS": _FILL, "ADDITEMS": _FILL, "FRAME": _FRAME,
    }  # fmt: skip
    table = np.full((256, 5), _REFUSED, np.int8)
    for opcode in pickletools.opcodes:
        if opcode.name in _ACCEPTED:
            mark = pickletools.markobject in opcode.stack_before
            under = opcode.stack_before.index(pickletools.markobject) if mark else len(opcode.stack_before)
            pushes = 0 if opcode.name in ("MARK", "MEMOIZE") else len(opcode.stack_after)
            pops = 0 if opcode.name == "MEMOIZE" else under
            argument = opcode.arg.n if opcode.arg else 0
            table[ord(opcode.code)] = argument, pops, pushes, mark, actions.get(opcode.name, _NOTHING)
    return table


_TABLE = _table()


@kernel
def _run(data: NDArray[np.uint8], table: NDArray[np.int8]) -> int:
    """Run a pickle on a stack of depths; return the number of its problem, or 0."""
    stack, memo = np.empty(len(data), np.uint8), np.full(len(data) + 1, 255, np.uint8)  # 255: not in the memo
    marks = np.empty(len(data), np.int64)
    size, marked, memoized, at = 0, 0, 0, 0
    while at < len(data):
        opcode = data[at]
        argument, action = table[opcode, _ARGUMENT], table[opcode, _ACTION]
        start = at + 1
        at, number = _skip_argument(data, start, argument)
        if at < 0:
            return -at
        if action == _FRAME and not 0 <= number <= len(data) - at:
            return _LONG
        floor = marks[marked - 1] if marked else 0
        if action == _STOP:
            return 0 if size == 1 and not marked else _DAMAGED
        if action == _MARK:
            marks[marked] = size
            marked += 1
            continue
        low = size
        if table[opcode, _TO_MARK]:
            if not marked:
                return _DAMAGED
            marked -= 1
            low, floor = floor, marks[marked - 1] if marked else 0
        low -= table[opcode, _POPS]
        if low < floor or (action == _PUT and size <= floor):
            return _DAMAGED
        value = 0
        if action == _TUPLE:
            for i in range(low, size):
                value = max(value, stack[i] & 127)
            value += 1
            if value > MAX_DEPTH:
                return _DEEP
        elif action in (_FILL, _BUILD):
            value = stack[low]
            if value == _FUNCTION:
                return _CALL
        elif action == _REDUCE and stack[low] != _FUNCTION:
            return _CALL
        elif action == _GLOBAL:
            value = _FUNCTION
        elif action == _GET:
            if number >= len(memo) or memo[number] == 255:
                return _MEMO
            value = memo[number]
        elif action == _PUT:
            number = memoized if argument == 0 else number
            if number > at or number >= len(memo):
                return _MEMO
            memoized += memo[number] == 255
            memo[number] = stack[size - 1]
        size = low
        if table[opcode, _PUSHES]:
            stack[size] = value
            size += 1
    return _ENDLESS


@kernel
def _skip_argument(data: NDArray[np.uint8], at: int, argument: int) -> tuple[int, int]:
    """The end of an opcode's argument at `at`, and its value if it is a number; or minus a problem, and 0."""
    width = argument
    if argument == _REFUSED:
        return -_DAMAGED, 0
    if argument == _LINES:
        for _ in range(2):
            while at < len(data) and data[at] != 10:
                at += 1
            at += 1
        return (at, 0) if at < len(data) else (-_ENDLESS, 0)
    if argument < 0:
        width = 1 if argument == -2 else 8 if argument == -5 else 4
    if at + width > len(data):
        return -_ENDLESS, 0
    number = np.uint64(0)
    for i in range(width):
        number |= np.uint64(data[at + i]) << np.uint64(8 * i)
    at += width
    if argument >= 0:
        return at, int(np.int64(number))
    if number > np.uint64(len(data) - at):
        return -_LONG, 0
    return int(at + np.int64(number)), 0


# What scan_rows found: it needs more bytes or more room, a file's name, the end, or something else than files and rows.
MORE, NAME, END, OTHER = range(4)
# Where scan_rows is: before a batch of items, a name, a value; in a set, its items; after set's name; in the list of a
# set's items, between its batches or in one; after an item alone, the list in a tuple, the call of set.
_BATCH, _FILE, _VALUE, _SET, _ADDED, _CALLED, _LIST, _APPENDED, _ITEM, _TUPLED, _MADE = range(11)
SCAN_STATE = 4  # numbers in the state of scan_rows: where it is, whether in a batch of items, the bounds of a name
_BUILTIN_SET = np.frombuffer(b"builtins\nset\n", np.uint8)
_NUMBERS = (0x4B, 0x4D, 0x4A, 0x8A)  # BININT1, BININT2, BININT, LONG1
_MEMOIZED = (0x94, 0x71, 0x72)  # MEMOIZE, BINPUT, LONG_BINPUT


@kernel
def scan_rows(data: NDArray[np.uint8], state: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[int, int, int]:
    """Store the rows in a piece of a pickled {file: {rows}}, from after its EMPTY_DICT on, as picklers write it.

    Returns the bytes scanned, the number of rows, and why it stopped. The name of a file is data[state[2] : state[3]].
    """
    at, count = 0, 0
    while count < len(rows) and at < len(data):
        opcode, where = data[at], state[0]
        start, end, number = _find_argument(data, at, opcode)
        if end > len(data):
            return at, count, MORE
        after = -1
        if opcode == 0x95 or opcode in _MEMOIZED:  # FRAME
            after = where
        elif opcode in _NUMBERS and number >= 0:
            after = where if where in (_ADDED, _APPENDED) else _ITEM if where == _LIST else -1
            rows[count] = number
            count += 1
        elif opcode == 0x8C or opcode == 0x58:  # a string
            if where in (_BATCH, _FILE) or (state[1] and where in (_SET, _MADE)):
                state[0], state[1], state[2], state[3] = _VALUE, where != _BATCH, start, end
                return end, count, NAME
        elif opcode == 0x28:  # MARK
            after = _FILE if where == _BATCH else _ADDED if where == _SET else _APPENDED if where == _LIST else -1
            state[1] |= where == _BATCH
        elif where == _VALUE:  # EMPTY_SET, or GLOBAL
            after = _SET if opcode == 0x8F else _CALLED if opcode == 0x63 and _is_set(data[start:end]) else -1
        elif where in (_SET, _MADE) and opcode == (0x75 if state[1] else 0x73):  # SETITEMS, SETITEM
            after, state[1] = _BATCH, 0
        elif where == _ADDED and opcode == 0x90:  # ADDITEMS
            after = _SET
        elif (where, opcode) in ((_CALLED, 0x5D), (_APPENDED, 0x65), (_ITEM, 0x61)):  # EMPTY_LIST, APPENDS, APPEND
            after = _LIST
        elif where == _LIST and opcode == 0x85:  # TUPLE1
            after = _TUPLED
        elif where == _TUPLED and opcode == 0x52:  # REDUCE
            after = _MADE
        elif where == _BATCH and opcode == 0x2E:  # STOP
            return end, count, END
        if after < 0:
            return at, count, OTHER
        state[0], at = after, end
    return at, count, MORE


@kernel
def _find_argument(data: NDArray[np.uint8], at: int, opcode: int) -> tuple[int, int, int]:
    """Where the data of an opcode's argument starts and ends, and its value if it is a number; -1: no number."""
    width = 0
    if opcode == 0x4B or opcode == 0x71 or opcode == 0x8A or opcode == 0x8C:
        width = 1
    elif opcode == 0x4D:
        width = 2
    elif opcode == 0x4A or opcode == 0x72 or opcode == 0x58:
        width = 4
    elif opcode == 0x95:
        width = 8
    elif opcode == 0x63:
        return at + 1, at + 1 + len(_BUILTIN_SET), -1
    start = at + 1 + width
    if width == 0 or width == 8 or start > len(data):
        return start, start, -1
    number = _read_number(data, at + 1, width)
    if opcode == 0x4A:
        return start, start, number if number < 1 << 31 else -1
    if opcode != 0x8A and opcode != 0x8C and opcode != 0x58:
        return start, start, number
    end = start + number
    if opcode == 0x8A and end <= len(data):
        is_row = 0 < number <= 8 and data[end - 1] < 128
        return start, end, _read_number(data, start, number) if is_row else -1
    return start, end, -1


@kernel
def _read_number(data: NDArray[np.uint8], at: int, width: int) -> int:
    number = np.uint64(0)
    for i in range(width):
        number |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return int(np.int64(number))


@kernel
def _is_set(name: NDArray[np.uint8]) -> bool:
    is_same = True
    for i in range(len(_BUILTIN_SET)):  # numba's np.all imports scipy into every process that reads this kernel
        is_same &= name[i] == _BUILTIN_SET[i]
    return is_same
