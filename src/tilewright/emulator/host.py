"""Runs the exported host function of a CuTe DSL kernel on host tensors and captures its launches.

The object is linked against small C stubs (host_stubs.c) in place of CUDA and TVM-FFI. Tensors get
virtual device addresses, 64 GiB apart, so that a pointer names its tensor and one that leaves it
cannot fall into another.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.emulator.chip import Chip
from tilewright.emulator.parse import Kernel

STUBS = Path(__file__).with_name("host_stubs.c")
REGION_BITS = 36  # a tensor's virtual address is (its number + 1) << REGION_BITS


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor of the caller's, with the address that the kernel sees.

    `bytes` is a flat uint8 view of its storage, from its first to its last element.
    """

    name: str
    address: int
    bytes: np.ndarray
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: tuple[int, int]  # DLPack code and bits
    owner: Any = field(repr=False, default=None)


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `params` is the parameter space as the kernel reads it."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    params: bytes


class _Any(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint64)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Array(ctypes.Structure):
    """TVM-FFI's ArrayObj: object header, then a sequence cell."""

    _fields_ = [
        ("references", ctypes.c_uint64),
        ("type", ctypes.c_int32),
        ("pad", ctypes.c_uint32),
        ("deleter", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("data_deleter", ctypes.c_void_p),
    ]


_NONE, _INT, _BOOL, _FLOAT, _TENSOR, _ARRAY = 0, 1, 2, 3, 7, 71
_CUDA = 2
_CLUSTER_ATTRIBUTE = 4
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)
)
_ERROR = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def call_packed(function: Any, values: list[_Any]) -> int:
    """Calls a TVM-FFI function; 0 if it succeeded."""
    array, result = (_Any * max(len(values), 1))(*values), _Any()
    return function(None, array, len(values), ctypes.byref(result))


def cache_dir() -> Path:
    """Where linked hosts and parsed kernels are kept: $TILEWRIGHT_CACHE or the user's cache."""
    root = os.environ.get("TILEWRIGHT_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    path = base / "tilewright" / "emulator"
    path.mkdir(parents=True, exist_ok=True)
    return path


class Host:
    """The host function of one exported object (`export_to_c(path, function_name=...)`)."""

    def __init__(self, object_path: str | Path, chip: Chip, kernels: dict[str, Kernel]):
        self.kernels = kernels
        self.library = ctypes.CDLL(str(_link(Path(object_path))))
        self.function = self.library[entry_name(Path(object_path))]
        self.launches: list[Launch] = []
        self.errors: list[str] = []
        self._callbacks = (_LAUNCH(self._launch), _ERROR(self._error))
        _set(self.library, "emulator_launch", ctypes.cast(self._callbacks[0], ctypes.c_void_p))
        _set(self.library, "emulator_error", ctypes.cast(self._callbacks[1], ctypes.c_void_p))
        ctypes.c_int.in_dll(self.library, "emulator_shared_bytes").value = chip.shared_bytes
        ctypes.c_int.in_dll(self.library, "emulator_multiprocessors").value = chip.multiprocessors

    def call(self, *arguments: Any) -> tuple[list[Launch], list[DeviceTensor]]:
        """Call with numpy or torch tensors, numbers, None and tuples of these.

        Raises ValueError with the host function's own message where it refuses the arguments.
        """
        self.launches, self.errors = [], []
        packer = Packer()
        status = call_packed(self.function, [packer.pack(a) for a in arguments])
        if status or self.errors:
            raise ValueError("the host function refused: " + "".join(self.errors))
        return self.launches, packer.tensors

    def _error(self, message: bytes) -> None:
        self.errors.append(message.decode())

    def _launch(self, config: int, name: bytes, params: Any) -> int:
        try:
            self.launches.append(self._read_launch(config, name.decode(), params))
        except Exception as error:  # an exception must not pass through the C frames
            self.errors.append(f"{type(error).__name__}: {error}")
            return 1
        return 0

    def _read_launch(self, config: int, name: str, params: Any) -> Launch:
        kernel = self.kernels.get(name)
        if kernel is None:
            raise ValueError(f"kernel {name} is launched, the PTX holds {list(self.kernels)}")
        dims = (ctypes.c_uint32 * 6).from_address(config)
        (shared,) = (ctypes.c_uint64 * 1).from_address(config + 24)
        (attributes,) = (ctypes.c_uint64 * 1).from_address(config + 40)
        (count,) = (ctypes.c_uint32 * 1).from_address(config + 48)
        cluster = (1, 1, 1)
        for i in range(count):
            words = (ctypes.c_uint32 * 5).from_address(attributes + 72 * i)
            if words[0] == _CLUSTER_ATTRIBUTE:
                cluster = (words[2], words[3], words[4])
        size = max((v.offset + v.size for v in kernel.params.values()), default=0)
        space = bytearray(size)
        for i, variable in enumerate(kernel.params.values()):
            raw = ctypes.string_at(params[i], variable.size)
            space[variable.offset : variable.offset + variable.size] = raw
        return Launch(name, tuple(dims[:3]), tuple(dims[3:]), cluster, shared, bytes(space))


class Packer:
    """Turns Python arguments into TVM-FFI values and keeps alive what they point to."""

    def __init__(self) -> None:
        self.tensors: list[DeviceTensor] = []
        self.alive: list[Any] = []

    def pack(self, value: Any) -> _Any:
        if value is None:
            return _Any(_NONE, 0, 0)
        if isinstance(value, bool):
            return _Any(_BOOL, 0, int(value))
        if isinstance(value, (int, np.integer)):
            return _Any(_INT, 0, int(value) & (2**64 - 1))
        if isinstance(value, (float, np.floating)):
            return _Any(_FLOAT, 0, int(np.float64(value).view(np.uint64)))
        if isinstance(value, (tuple, list)):
            return self._pack_sequence(value)
        return self._pack_tensor(value)

    def _pack_sequence(self, values: Sequence[Any]) -> _Any:
        items = (_Any * max(len(values), 1))(*[self.pack(v) for v in values])
        array = _Array(1, _ARRAY, 0, None, ctypes.addressof(items), len(values), len(values), None)
        self.alive += [items, array]
        return _Any(_ARRAY, 0, ctypes.addressof(array))

    def _pack_tensor(self, value: Any) -> _Any:
        number = len(self.tensors)
        address = (number + 1) << REGION_BITS
        return self.add(device_tensor(value, f"argument {number}", address))

    def add(self, tensor: DeviceTensor) -> _Any:
        """A tensor whose address is known already."""
        rank = len(tensor.shape)
        shape = (ctypes.c_int64 * max(rank, 1))(*tensor.shape)
        strides = (ctypes.c_int64 * max(rank, 1))(*tensor.strides)
        header = _DLTensor(tensor.address, _CUDA, 0, rank, *tensor.dtype, 1, shape, strides, 0)
        self.alive += [shape, strides, header]
        self.tensors.append(tensor)
        return _Any(_TENSOR, 0, ctypes.addressof(header))


_NUMPY_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_NAMED_CODES = {"bfloat16": (4, 16), "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8)}


def device_tensor(value: Any, name: str, address: int) -> DeviceTensor:
    """A view of a numpy array or a torch CPU tensor; raises TypeError for anything else."""
    if isinstance(value, np.ndarray):
        strides = tuple(s // value.itemsize for s in value.strides)
        kind = str(value.dtype)
        pointer, itemsize = value.ctypes.data, value.itemsize
    elif hasattr(value, "data_ptr"):
        if value.device.type != "cpu":
            raise TypeError(f"{name}: a tensor on {value.device}, wanted one in host memory")
        strides, kind = tuple(value.stride()), str(value.dtype).removeprefix("torch.")
        pointer, itemsize = value.data_ptr(), value.element_size()
    else:
        raise TypeError(f"{name}: {type(value).__name__}, wanted a tensor, a number or None")
    shape = tuple(int(s) for s in value.shape)
    code = _NAMED_CODES.get(kind) or (_NUMPY_CODES[np.dtype(kind).kind], itemsize * 8)
    extent = sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True)) + 1
    size = extent * itemsize if all(shape) else 0
    storage = np.zeros(0, np.uint8)
    if size:
        storage = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))
    return DeviceTensor(name, address, storage, shape, strides, code, value)


def _link(object_path: Path) -> Path:
    """The shared library of an object and the stubs, linked once and kept."""
    digest = hashlib.sha256(object_path.read_bytes() + STUBS.read_bytes()).hexdigest()[:24]
    library = cache_dir() / f"host-{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / "host.so"
            command = [
                "cc",
                "-shared",
                "-fPIC",
                "-O1",
                "-w",
                "-Wl,-Bsymbolic",
                "-o",
                str(built),
                str(object_path),
                str(STUBS),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"cannot link {object_path}: {done.stderr}")
            built.replace(library)
    return library


def entry_name(object_path: Path) -> str:
    """The `__tvm_ffi_` symbol of an ELF object, found by its name in the string table."""
    data = object_path.read_bytes()
    marker = b"\0__tvm_ffi_"
    start = data.rfind(marker)
    if start < 0:
        raise ValueError(f"{object_path} exports no __tvm_ffi_ function: export it with TVM-FFI")
    return data[start + 1 : data.index(b"\0", start + 1)].decode()


def _set(library: ctypes.CDLL, name: str, value: ctypes.c_void_p) -> None:
    ctypes.c_void_p.in_dll(library, name).value = value.value
