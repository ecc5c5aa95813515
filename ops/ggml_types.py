"""The tensor types of GGUF files: one row per type, plain data without torch. Headers of other languages come from it.

Ids, block lengths and sizes are those of ggml (`enum ggml_type` in ggml.h, block structs in ggml-common.h). The lattice
of a weight type is the type to which ggml's CPU backend rounds the activation before it multiplies (`vec_dot_type`).
"""

from dataclasses import dataclass

from dasllama_torch.errors import UnsupportedModel

F32, F16, Q4_0, Q4_1 = 0, 1, 2, 3  # 4 and 5 were withdrawn before GGUF
Q5_0, Q5_1, Q8_0, Q8_1 = 6, 7, 8, 9
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K = 10, 11, 12, 13, 14, 15
IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ4_NL, IQ3_S, IQ2_S, IQ4_XS = 16, 17, 18, 19, 20, 21, 22, 23
I8, I16, I32, I64, F64 = 24, 25, 26, 27, 28
IQ1_M, BF16 = 29, 30  # 31 to 33 and 36 to 38 were repacked Q4_0 and IQ4_NL, withdrawn
TQ1_0, TQ2_0 = 34, 35
MXFP4, NVFP4, Q1_0, Q2_0 = 39, 40, 41, 42


@dataclass(frozen=True, slots=True)
class GGMLType:
    """One type. `block` elements are stored in `bytes` bytes; a row of a tensor is a whole number of blocks.

    lattice: the id of the type to which an activation is rounded: F32, F16, BF16, Q8_0 (blocks of 32: f16 scale, int8),
    Q8_1 (blocks of 32: f16 scale, f16 scaled sum, int8) or Q8_K (blocks of 256: f32 scale, int8, int16 sums of 16).
    None where the type is no weight type: Q8_1 and Q8_K themselves and plain numbers.
    """

    id: int
    name: str
    block: int
    bytes: int
    lattice: int | None = None

    @property
    def is_weight(self) -> bool:
        """Whether a weight matrix may have this type."""
        return self.lattice is not None

    @property
    def is_float(self) -> bool:
        """Whether the type is an unpacked float: F32, F16, BF16 or F64."""
        return self.id in (F32, F16, BF16, F64)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per element, scales included."""
        return 8 * self.bytes / self.block

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of n elements. Raises UnsupportedModel when n is not a multiple of the block."""
        if n % self.block:
            raise UnsupportedModel(f"{self.name}: a row of {n} elements is not a multiple of the block of {self.block}")
        return n // self.block * self.bytes


GGML_TYPES: dict[int, GGMLType] = {
    row.id: row
    for row in (
        GGMLType(F32, "F32", 1, 4, F32),
        GGMLType(F16, "F16", 1, 2, F16),
        GGMLType(BF16, "BF16", 1, 2, BF16),
        GGMLType(Q4_0, "Q4_0", 32, 18, Q8_0),
        GGMLType(Q4_1, "Q4_1", 32, 20, Q8_1),
        GGMLType(Q5_0, "Q5_0", 32, 22, Q8_0),
        GGMLType(Q5_1, "Q5_1", 32, 24, Q8_1),
        GGMLType(Q8_0, "Q8_0", 32, 34, Q8_0),
        GGMLType(Q2_K, "Q2_K", 256, 84, Q8_K),
        GGMLType(Q3_K, "Q3_K", 256, 110, Q8_K),
        GGMLType(Q4_K, "Q4_K", 256, 144, Q8_K),
        GGMLType(Q5_K, "Q5_K", 256, 176, Q8_K),
        GGMLType(Q6_K, "Q6_K", 256, 210, Q8_K),
        GGMLType(IQ1_S, "IQ1_S", 256, 50, Q8_K),
        GGMLType(IQ1_M, "IQ1_M", 256, 56, Q8_K),
        GGMLType(IQ2_XXS, "IQ2_XXS", 256, 66, Q8_K),
        GGMLType(IQ2_XS, "IQ2_XS", 256, 74, Q8_K),
        GGMLType(IQ2_S, "IQ2_S", 256, 82, Q8_K),
        GGMLType(IQ3_XXS, "IQ3_XXS", 256, 98, Q8_K),
        GGMLType(IQ3_S, "IQ3_S", 256, 110, Q8_K),
        GGMLType(IQ4_NL, "IQ4_NL", 32, 18, Q8_0),
        GGMLType(IQ4_XS, "IQ4_XS", 256, 136, Q8_K),
        GGMLType(TQ1_0, "TQ1_0", 256, 54, Q8_K),
        GGMLType(TQ2_0, "TQ2_0", 256, 66, Q8_K),
        GGMLType(Q1_0, "Q1_0", 128, 18, Q8_0),
        GGMLType(Q2_0, "Q2_0", 64, 18, Q8_0),
        GGMLType(MXFP4, "MXFP4", 32, 17, Q8_0),
        GGMLType(NVFP4, "NVFP4", 64, 36, Q8_0),
        # blocks of the activation lattices
        GGMLType(Q8_1, "Q8_1", 32, 36),
        GGMLType(Q8_K, "Q8_K", 256, 292),
        # plain numbers, which a file may hold beside its weights
        GGMLType(I8, "I8", 1, 1),
        GGMLType(I16, "I16", 1, 2),
        GGMLType(I32, "I32", 1, 4),
        GGMLType(I64, "I64", 1, 8),
        GGMLType(F64, "F64", 1, 8),
    )
}

WEIGHT_TYPES: tuple[int, ...] = tuple(row.id for row in GGML_TYPES.values() if row.is_weight)

_BY_NAME = {row.name: row for row in GGML_TYPES.values()}


def by_name(name: str) -> GGMLType:
    """The row of a type by ggml's name for it, in capitals ("Q4_K"). Raises UnsupportedModel for an unknown name."""
    if name not in _BY_NAME:
        raise UnsupportedModel(f"unknown tensor type {name!r}; known: {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]


def weight_type(qtype: int) -> GGMLType:
    """The row of a weight type by its id. Raises UnsupportedModel for an unknown id and for a type of no weights."""
    row = GGML_TYPES.get(qtype)
    if row is None:
        raise UnsupportedModel(f"unknown tensor type {qtype}: not one of ggml's types")
    if not row.is_weight:
        raise UnsupportedModel(f"tensor type {row.name} is not a weight type")
    return row


def row_bytes(qtype: int, n: int) -> int:
    """Bytes of a row of n elements of a weight type. Raises UnsupportedModel for other ids or lengths."""
    return weight_type(qtype).row_bytes(n)


def bits_per_weight(qtype: int) -> float:
    """Stored bits per element of a weight type, scales included. Raises UnsupportedModel as `weight_type`."""
    return weight_type(qtype).bits_per_weight
