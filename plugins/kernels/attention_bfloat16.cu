#include "attention_instances.cuh"

namespace dflash {

AttentionVariants attention_variants_bfloat16() { return variants<__nv_bfloat16, false>(); }

}  // namespace dflash
