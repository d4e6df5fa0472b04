"""The calls about devices and contexts."""

from ._entry import entry, number_of
from ._enums import CUdevice_attribute, CUresult, CUstreamCaptureMode
from ._refusal import Refusal, invalid
from ._state import CONTEXT, STATE, uuid
from ._structs import CUcontext, CUdevice, CUuuid


@entry(after_loss=True)
def cuInit(Flags: int) -> None:
    if Flags:
        raise invalid("Flags must be 0")
    if not STATE.visible():
        raise Refusal(CUresult.CUDA_ERROR_NO_DEVICE, "no device is visible")
    STATE.started = True


@entry(1, after_loss=True)
def cuDriverGetVersion() -> int:
    return STATE.settings.driver_version


@entry(1, after_loss=True)
def cuDeviceGetCount() -> int:
    return len(STATE.visible())


@entry(1, after_loss=True)
def cuDeviceGet(ordinal: int) -> CUdevice:
    number_of(ordinal)
    return CUdevice(ordinal)


@entry(1, after_loss=True)
def cuDeviceGetUuid(dev: CUdevice | int) -> CUuuid:
    return CUuuid(uuid(number_of(dev)))


@entry(1, after_loss=True)
def cuDeviceGetName(length: int, dev: CUdevice | int) -> bytes:
    return f"Fake GPU {number_of(dev)}".encode()[: length - 1].ljust(length, b"\0")


@entry(1, after_loss=True)
def cuDeviceGetPCIBusId(length: int, dev: CUdevice | int) -> bytes:
    return f"0000:{0x3B + number_of(dev):02X}:00.0".encode()[: length - 1].ljust(length, b"\0")


@entry(1, after_loss=True)
def cuDeviceGetAttribute(attrib: CUdevice_attribute, dev: CUdevice | int) -> int:
    number_of(dev)
    off = STATE.settings.features_off
    prefix = "CU_DEVICE_ATTRIBUTE_"
    match attrib.name.removeprefix(prefix):
        case "COMPUTE_MODE":
            return 0
        case "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED":
            return int("vmm" not in off)
        case "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM":
            return int("registered_address" not in off)
        case "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED":
            return int("posix_fd" not in off)
        case _:
            return 1


@entry(1)
def cuDevicePrimaryCtxRetain(dev: CUdevice | int) -> CUcontext:
    number_of(dev)
    STATE.retained[CONTEXT + int(dev)] += 1
    return CUcontext(CONTEXT + int(dev))


@entry()
def cuDevicePrimaryCtxRelease(dev: CUdevice | int) -> None:
    if not STATE.retained[CONTEXT + int(dev)]:
        raise Refusal(CUresult.CUDA_ERROR_INVALID_CONTEXT, "the context was not retained")
    STATE.retained[CONTEXT + int(dev)] -= 1


@entry(after_loss=True)
def cuCtxSetCurrent(ctx: CUcontext | int) -> None:
    STATE.thread.contexts[-1:] = [_live_context(ctx)]


@entry(after_loss=True)
def cuCtxPushCurrent(ctx: CUcontext | int) -> None:
    STATE.thread.contexts.append(_live_context(ctx))


@entry(1, after_loss=True)
def cuCtxPopCurrent() -> CUcontext:
    if not STATE.thread.contexts:
        raise Refusal(CUresult.CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread")
    return CUcontext(STATE.thread.contexts.pop())


@entry(1, after_loss=True)
def cuThreadExchangeStreamCaptureMode(mode: CUstreamCaptureMode) -> CUstreamCaptureMode:
    before = CUstreamCaptureMode(STATE.thread.capture_mode)
    STATE.thread.capture_mode = CUstreamCaptureMode(mode)
    return before


def cuGetErrorString(error: CUresult) -> tuple[CUresult, bytes]:
    return CUresult.CUDA_SUCCESS, f"the fake's {error.name}".encode()


def _live_context(ctx: CUcontext | int) -> int:
    if not STATE.retained[int(ctx)]:
        raise Refusal(CUresult.CUDA_ERROR_INVALID_CONTEXT, f"no context {int(ctx):#x}")
    return int(ctx)
