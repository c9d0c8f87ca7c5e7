// Calls of ik_llama.cpp with plain arguments. Its structs change from commit to commit, so this file is compiled
// against the header of the source tree that is measured, and engine_ik.py never sees a struct.
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "llama.h"

static void silent(enum ggml_log_level level, const char *text, void *data) {
    (void)level, (void)text, (void)data;
}

struct engine {
    struct llama_model *model;
    struct llama_context *context;
    struct llama_batch batch;
};

static struct engine the_engine;

// Loads a model with weights repacked for this processor. Returns 0, or 1 if the file or its settings are refused.
int ik_open(const char *path, int threads, int context, int sequences, int rows) {
    llama_log_set(silent, NULL);
    llama_backend_init();
    struct llama_model_params model = llama_model_default_params();
    model.repack_tensors = true;
    model.use_mmap = false; // repacking needs writable memory
    the_engine.model = llama_model_load_from_file(path, model);
    if (!the_engine.model) return 1;
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t)(context * sequences);
    params.n_seq_max = (uint32_t)sequences;
    params.n_batch = params.n_ubatch = (uint32_t)rows;
    params.n_threads = params.n_threads_batch = (uint32_t)threads;
    params.flash_attn = true;
    the_engine.context = llama_init_from_model(the_engine.model, params);
    if (!the_engine.context) return 1;
    the_engine.batch = llama_batch_init(rows, 0, 1);
    return 0;
}

// Computes a batch; has_logits[i] is nonzero for rows whose logits are computed. Returns llama_decode's result.
int ik_run(int rows, const int32_t *token, const int32_t *position, const int32_t *sequence, const int8_t *has_logits) {
    struct llama_batch *batch = &the_engine.batch;
    batch->n_tokens = rows;
    memcpy(batch->token, token, sizeof *token * (size_t)rows);
    memcpy(batch->pos, position, sizeof *position * (size_t)rows);
    memcpy(batch->logits, has_logits, (size_t)rows);
    for (int row = 0; row < rows; row++) {
        batch->n_seq_id[row] = 1;
        batch->seq_id[row][0] = sequence[row];
    }
    int result = llama_decode(the_engine.context, *batch);
    llama_synchronize(the_engine.context);
    return result;
}

// Returns the logits of a row of the last batch: float32, as many as the vocabulary has tokens.
float *ik_logits(int row) {
    return llama_get_logits_ith(the_engine.context, row);
}

// Removes the tokens of a sequence from `first` on.
void ik_forget(int sequence, int first) {
    llama_kv_cache_seq_rm(the_engine.context, sequence, first, -1);
}

// Quantizes a GGUF file, every matrix to one format. Returns 0 on success.
int ik_quantize(const char *input, const char *output, int format) {
    llama_log_set(silent, NULL);
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = (enum llama_ftype)format;
    params.pure = true;
    return (int)llama_model_quantize(input, output, &params);
}
