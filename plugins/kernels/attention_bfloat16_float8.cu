#include "attention_instances.cuh"

namespace dflash {

AttentionVariants attention_variants_bfloat16_float8() { return variants<__nv_bfloat16, true>(); }

}  // namespace dflash
