"""What the fake says of NVIDIA's bindings is so in the real ones, which can be imported without a GPU.

kvtier's code is tested on the fake, so what it uses is there; here the fake is held to the real package: names,
arguments, numbers of answers, values, fields. That is so for all bindings from 12.9.1 on, whichever are installed.
"""

import ctypes.util
import inspect
import re
import textwrap
from enum import EnumType
from pathlib import Path

import cuda.bindings
import pytest
from cuda.bindings import driver as real

from kvtier.abi.cuda import errors
from kvtier.abi.cuda.driver import Driver
from kvtier.abi.cuda.errors import CudaUnavailable
from tests.fake_cuda import load_fake

ROOT = Path(__file__).parents[4]
CODE = sorted((ROOT / "client/kvtier/abi/cuda").glob("*.py"))
MAJOR = int(cuda.bindings.__version__.split(".")[0])

FAKE = load_fake(bindings=MAJOR, max_delay_ms=0)
CALLS = sorted(name for name in vars(FAKE) if re.match(r"cu[A-Z]", name))
ENUMS = sorted(name for name, value in vars(FAKE).items() if isinstance(value, EnumType) and name.startswith("CU"))
STRUCTS = ("CUmemAccessDesc", "CUmemAllocationProp", "CUmemLocation", "CUmemcpyAttributes", "CUuuid")
NUMBERS = ("CUcontext", "CUdevice", "CUdeviceptr", "CUevent", "CUmemGenericAllocationHandle", "CUstream")


def used_in_code(pattern):
    return {name for page in CODE for name in re.findall(pattern, page.read_text())}


def arguments_of(call):
    """Names of the real one's, out of the signature that it embeds in its documentation."""
    signature = getattr(real, call).__doc__.split("\n")[0].removeprefix(call).strip("()")
    signature = re.sub(r"\[.*?\]+", "", signature)
    return [part.split(":")[0].split()[-1] for part in signature.split(",") if part.strip()]


def outputs_of(call):
    # The first ones of a major version indent all but the signature.
    text = textwrap.dedent(getattr(real, call).__doc__.split("\n", 2)[2])
    answers = re.search(r"Returns\n-+\n(.*?)(?:\n\n|\Z)", text, re.DOTALL)
    assert answers is not None
    return len(re.findall(r"^\w+(?: :.*)?$", answers[1], re.MULTILINE)) - 1


@pytest.mark.parametrize("call", CALLS)
def test_a_call_has_these_arguments_and_answers(call):
    fake = getattr(FAKE, call)
    assert list(inspect.signature(fake).parameters) == arguments_of(call)
    assert getattr(fake, "outputs", 1) == outputs_of(call)


@pytest.mark.parametrize("name", ENUMS)
def test_a_number_has_this_value(name):
    members = getattr(FAKE, name).__members__
    assert {member: int(getattr(getattr(real, name), member)) for member in members} == {
        member: int(value) for member, value in members.items()
    }


@pytest.mark.parametrize("name", ["CU_MEMHOSTALLOC_PORTABLE", "CU_MEMHOSTREGISTER_PORTABLE"])
def test_a_flag_has_this_value(name):
    assert getattr(real, name) == getattr(FAKE, name)


@pytest.mark.parametrize("name", STRUCTS)
def test_a_structure_has_these_fields(name):
    fields = set(getattr(FAKE, name).__dataclass_fields__)
    assert fields <= {field for field in dir(getattr(real, name)()) if not field.startswith("_")}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_handle_is_made_of_an_int_and_becomes_one(name):
    assert int(getattr(real, name)(0x1234)) == int(getattr(FAKE, name)(0x1234)) == 0x1234


def test_an_answer_without_an_error_is_false_and_equal_to_its_number():
    assert not real.CUresult.CUDA_SUCCESS
    assert real.CUresult.CUDA_ERROR_NOT_READY == errors.NOT_READY == 600


def test_the_code_uses_nothing_that_the_fake_lacks():
    known = set(vars(FAKE)) | {member for name in ENUMS for member in getattr(FAKE, name).__members__}
    attributes = {f"CU_DEVICE_ATTRIBUTE_{name}" for name in used_in_code(r'attribute\("(\w+)"\)')}
    names = used_in_code(r"\b(?:cu[A-Z]|CU_|CU[a-z])\w+") - {"CU_DEVICE_ATTRIBUTE_"}
    assert attributes
    assert {"cuMemMap", "cuMemcpyBatchAsync", "CUmemAccessDesc"} <= names
    assert (names | attributes) - known <= ({"cuDeviceGetUuid_v2"} if MAJOR > 12 else set()) | {"CUresult"}


def test_only_one_package_knows_nvidias_calls():
    theirs = re.compile(r"\bcuda\.bindings\b|\.cu[A-Z]\w+\(")
    pages = [page for folder in ("client", "daemon") for page in (ROOT / folder).rglob("*.py")]
    assert {page for page in pages if theirs.search(page.read_text())} <= set(CODE)


# What errors mean. --------------------------------------------------------------------------------------------------


def documented_errors():
    """Name, and what NVIDIA says, of every CUresult: each one's own documentation, or, of bindings whose numbers have
    none, the source that comes with the package."""
    source = Path(real.__file__).parent / "driver.pyx"
    texts = _commented(source.read_text()) if source.exists() else {}
    documented = {
        int(code): (code.name.removeprefix("CUDA_ERROR_"), texts.get(code.name) or _in_one_line(code.__doc__ or ""))
        for code in real.CUresult
    }
    assert len({text for _, text in documented.values()}) > len(documented) // 2, "these bindings say nothing of them"
    return documented


def _commented(source):
    """What stands above each number, in a comment for documentation."""
    source = source[source.index("class CUresult(") :]
    found = re.findall(r"((?:^ +#:.*\n)+)\s*(CUDA_ERROR_\w+) = ", source.split("\nclass ", 1)[0], re.MULTILINE)
    return {name: _in_one_line(re.sub(r"^\s*#:", "", text, flags=re.MULTILINE)) for text, name in found}


def _in_one_line(text):
    return " ".join(text.split())


def test_errors_that_end_the_process_are_a_lost_device():
    documented = documented_errors()
    final = re.compile(r"process must be terminated|cannot be used anymore|uncorrectable|device is unavailable")
    named = {code: name for code, (name, text) in documented.items() if final.search(text)}
    assert len(named) >= 14
    assert named.items() <= errors.LOST.items()


def test_errors_are_what_they_are_called():
    documented = documented_errors()
    known = {code: name for code, name in (errors.LOST | errors.UNSUPPORTED).items() if code in documented}
    assert {code: documented[code][0] for code in known} == known
    assert (errors.LOST | errors.UNSUPPORTED).keys() - known <= ({36} if MAJOR == 12 else set())
    assert documented[errors.OUT_OF_MEMORY][0] == "OUT_OF_MEMORY"
    assert documented[errors.NOT_INITIALIZED][0] == "NOT_INITIALIZED"
    assert documented[errors.NO_DEVICE][0] == "NO_DEVICE"
    assert documented[errors.CAPTURE_IMPLICIT][0] == "STREAM_CAPTURE_IMPLICIT"
    assert documented[errors.CAPTURED_EVENT][0] == "CAPTURED_EVENT"
    assert not errors.LOST.keys() & errors.UNSUPPORTED.keys()


def test_what_is_not_supported_says_so():
    documented = documented_errors()
    refusal = re.compile(r"not (?:permitted|supported|yet ready|support)|newer CUDA driver|stub library|mismatch")
    assert [
        name for code, (name, text) in documented.items() if code in errors.UNSUPPORTED and not refusal.search(text)
    ] == []


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="NVIDIA's driver is here")
def test_without_a_driver_it_says_so():
    with pytest.raises(CudaUnavailable, match="NVIDIA's driver is not here"):
        Driver.open("cuda")
