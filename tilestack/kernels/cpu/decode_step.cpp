// A step of a dense decoder on a CPU: some tokens through all layers, in one call.
//
// Weights are rows of float32 or bfloat16, or of codes with scales (codes.h). Decoding reads every weight for a handful of
// tokens (few_tokens.h); prompts are matrix products (many_tokens.h), which are here for CPUs with instructions for bfloat16.

#include "few_tokens.h"
#include "many_tokens.h"
#include "sampling.h"

extern "C" int64_t most_tokens() { return MANY_TOKENS ? INT64_MAX : FEW; }  // that a step may have

extern "C" void decode_step(const void* given) {
    const Step& step = *static_cast<const Step*>(given);
    step.tokens > FEW ? run_many(step) : run_few(step);
}

// logits [tokens, count]: x [tokens, columns] times the rows of a matrix.
extern "C" void decode_head(const void* rows, const float* scale, const int8_t* zero, int64_t group, const float* x,
                            float* logits, int64_t tokens, int64_t columns, int64_t count, int64_t threads) {
    const auto head = MANY_TOKENS && tokens > FEW ? head_of_many : head_of_few;
    head({rows, scale, zero, group}, x, logits, tokens, columns, count, threads);
}
