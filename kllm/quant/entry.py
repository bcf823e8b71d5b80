"""How one KV vector is stored in each KV dtype, in bytes. No torch."""

from dataclasses import dataclass

SCALE_BYTES = {"fp32": 4, "ue8m0": 1}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFormat:
    """One stored vector and how it is packed when the KV dtype is FP8.

    In FP8 the first `fp8_channels` channels are e4m3 with one scale per `group` of them; the
    others (rope channels) stay bfloat16. `pad` bytes round the packed entry up.
    """

    width: int  # channels
    fp8_channels: int
    group: int  # channels a scale
    scale: str = "fp32"  # or "ue8m0", a power of two in one byte
    pad: int = 0

    def nbytes(self, kv_dtype: str) -> int:
        """Bytes of one entry. `kv_dtype`: fp8, or a torch dtype's name."""
        if kv_dtype != "fp8":
            return self.width * DTYPE_BYTES[kv_dtype]
        scales = -(-self.fp8_channels // self.group) * SCALE_BYTES[self.scale]
        return self.fp8_channels + scales + (self.width - self.fp8_channels) * 2 + self.pad
