#include "attention_instances.cuh"

namespace dflash {

AttentionVariants attention_variants_float16() { return variants<__half, false>(); }

}  // namespace dflash
