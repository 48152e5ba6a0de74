// The table of contents: every op of torch.ops.turboquant, its schema and nothing else. Kernels register themselves
// in csrc/cpu/<room>.cpp and csrc/cuda/<room>.cu or the room's folder (tests/test_house.py); fake implementations and
// documentation are in torch_turboquant/ops/<room>.py. The aggregates in csrc/calls repeat the long lists of arguments,
// field by field in the same order.
//
// Conventions: integers stand for names (scale_mode: 0 norm, 1 preserve, 2 mse, 3 unbiased), because strings cost
// microseconds per call. Constants of a cache (signs, levels, steps, center) are tensors, so that CUDA graphs hold no
// host state. Absent `levels` mean the uniform grid. Floats are used as float32 and must be finite there. Ops take no
// gradient, except for hadamard.
#include <torch/csrc/stable/library.h>

// clang-format off: one line per group of arguments
STABLE_TORCH_LIBRARY(turboquant, m) {
  // -- hadamard: signed orthonormal Walsh-Hadamard transform of the last dimension ------------------------------------
  m.def("hadamard(Tensor x, Tensor signs, bool inverse=False) -> Tensor");

  // -- pack: dense little-endian bit strings of codes -----------------------------------------------------------------
  m.def("pack(Tensor codes, int bits) -> Tensor");
  m.def("unpack(Tensor packed, int bits, int d) -> Tensor");

  // -- codec: standalone vectors [..., d] -----------------------------------------------------------------------------
  m.def("encode(Tensor x, Tensor signs, Tensor? levels, Tensor steps, int bits, int scale_mode, Tensor? center=None)"
        " -> (Tensor packed, Tensor scale)");
  m.def("decode(Tensor packed, Tensor scale, Tensor signs, Tensor? levels, int bits, ScalarType dtype,"
        " Tensor? center=None) -> Tensor");

  // -- group: affine quantisation of groups of channels, the paper-form baseline for values ---------------------------
  m.def("group_encode(Tensor x, int group, int bits) -> (Tensor packed, Tensor scale, Tensor zero)");
  m.def("group_decode(Tensor packed, Tensor scale, Tensor zero, int group, int bits, int d, ScalarType dtype)"
        " -> Tensor");

  // -- qjl: the 1-bit sketch of a residual and its inner-product estimator --------------------------------------------
  m.def("qjl_sketch(Tensor residual, Tensor projection) -> (Tensor sign_bits, Tensor norm)");
  m.def("qjl_score(Tensor q, Tensor sign_bits, Tensor norm, Tensor projection) -> Tensor");

  // -- score: attention scores straight from packed vectors -----------------------------------------------------------
  m.def("score(Tensor q, Tensor packed, Tensor scale, Tensor signs, Tensor? levels, int bits, Tensor? center=None,"
        " Tensor? sign_bits=None, Tensor? residual_norm=None, Tensor? projection=None) -> Tensor");

  // -- center: what keys are stored relative to, learned from a prompt ------------------------------------------------
  m.def("query_energy(Tensor[] queries, int kv_heads, int skip=0) -> Tensor");
  m.def("learn_center(Tensor[] keys, Tensor[] energies, Tensor? partners=None, int skip=0) -> Tensor");

  // -- cache: pages of packed keys and values, and the exact tail -----------------------------------------------------
  m.def("cache_store(Tensor k, Tensor v, Tensor(a!) cache, Tensor slot_mapping,"
        " Tensor key_signs, Tensor value_signs, Tensor? key_levels, Tensor? value_levels, Tensor key_steps,"
        " Tensor value_steps, Tensor? center, int page_size, int key_bits, int value_bits, int key_scale_mode,"
        " int value_scale_mode, Tensor(b!)? tail=None, Tensor? tail_slots=None, Tensor? seq_lens=None,"
        " Tensor? cu_seqlens_q=None, int sink_tokens=0) -> ()");
  m.def("cache_store_layers(Tensor[] k, Tensor[] v, Tensor(a!)[] caches, Tensor slot_mapping,"
        " Tensor[] key_signs, Tensor[] value_signs, Tensor? key_levels, Tensor? value_levels, Tensor key_steps,"
        " Tensor value_steps, Tensor[] centers, int page_size, int key_bits, int value_bits, int key_scale_mode,"
        " int value_scale_mode, Tensor(b!)[] tails, Tensor? tail_slots=None, Tensor? seq_lens=None,"
        " Tensor? cu_seqlens_q=None, int sink_tokens=0) -> ()");
  m.def("cache_load(Tensor cache, Tensor block_table, Tensor seq_lens,"
        " Tensor key_signs, Tensor value_signs, Tensor? key_levels, Tensor? value_levels, Tensor? center,"
        " int head_dim, int page_size, int key_bits, int value_bits, int max_seq_len, ScalarType dtype)"
        " -> (Tensor k, Tensor v)");

  // -- move: tokens from slot to slot, for eviction while decoding ----------------------------------------------------
  m.def("cache_move(Tensor(a!) cache, Tensor sources, Tensor targets, int head_dim, int page_size, int key_bits,"
        " int value_bits) -> ()");

  // -- attention: decode steps and small prefills over the packed cache -----------------------------------------------
#define PAGED_ATTENTION_ARGUMENTS(CACHE, TAIL) \
  "Tensor q, " CACHE " cache, Tensor block_table, Tensor seq_lens," \
  " Tensor key_signs, Tensor value_signs, Tensor? key_levels, Tensor? value_levels, Tensor? center," \
  " int page_size, int key_bits, int value_bits, float softmax_scale," \
  " Tensor? cu_seqlens_q=None, int max_q_len=1," \
  " " TAIL " tail=None, Tensor? tail_slots=None, Tensor? tail_valid=None, int sink_tokens=0, int recent_window=0," \
  " int sliding_window=0, float soft_cap=0.0, Tensor? sink_logits=None, Tensor? k_new=None, Tensor? v_new=None"
  m.def("paged_attention(" PAGED_ATTENTION_ARGUMENTS("Tensor", "Tensor?") ") -> (Tensor out, Tensor lse)");
  m.def("paged_attention_out(" PAGED_ATTENTION_ARGUMENTS("Tensor", "Tensor?") ", *, Tensor(a!) out,"
        " Tensor(b!)? lse=None) -> ()");
  m.def("store_and_attend(" PAGED_ATTENTION_ARGUMENTS("Tensor(a!)", "Tensor(b!)?") ","
        " *, Tensor slot_mapping, Tensor key_steps, Tensor value_steps, int key_scale_mode, int value_scale_mode,"
        " Tensor(c!) out, Tensor(d!)? lse=None) -> ()");
  m.def("merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)");

  // -- mass: the attention that each cached token gets, for eviction while decoding -----------------------------------
  m.def("paged_mass(" PAGED_ATTENTION_ARGUMENTS("Tensor", "Tensor?") ", *, Tensor lse, Tensor(a!) mass) -> ()");

  // -- mla: latent attention, one vector per token that is key and value of all query heads ---------------------------
  m.def("mla_store(Tensor latent, Tensor rope, Tensor(a!) cache, Tensor slot_mapping, Tensor? signs, Tensor? levels,"
        " Tensor steps, Tensor? center, int page_size, int bits, int scale_mode, ScalarType rope_dtype,"
        " Tensor(b!)? tail=None, Tensor? tail_slots=None, Tensor? seq_lens=None, Tensor? cu_seqlens_q=None,"
        " int sink_tokens=0, bool rotated_tail=False) -> ()");
  m.def("mla_load(Tensor cache, Tensor block_table, Tensor seq_lens, Tensor? signs, Tensor? levels, Tensor? center,"
        " int latent_dim, int rope_dim, int page_size, int bits, ScalarType rope_dtype, int max_seq_len,"
        " ScalarType dtype) -> (Tensor latent, Tensor rope)");
#define MLA_ATTENTION_ARGUMENTS \
  "Tensor q_latent, Tensor q_rope, Tensor cache, Tensor block_table, Tensor seq_lens," \
  " Tensor? signs, Tensor? levels, Tensor? center, int page_size, int bits, ScalarType rope_dtype," \
  " float softmax_scale, Tensor? cu_seqlens_q=None, int max_q_len=1," \
  " Tensor? tail=None, Tensor? tail_slots=None, Tensor? tail_valid=None, int sink_tokens=0, int recent_window=0," \
  " Tensor? latent_new=None, Tensor? rope_new=None"
  m.def("mla_attention(" MLA_ATTENTION_ARGUMENTS ") -> (Tensor out, Tensor lse)");
  m.def("mla_attention_out(" MLA_ATTENTION_ARGUMENTS ", *, Tensor(a!) out, Tensor(b!)? lse=None) -> ()");

  // -- linear: weights of linear layers in blocks of codes, and products with them ------------------------------------
  m.def("weight_encode(Tensor w, Tensor signs, Tensor? levels, Tensor steps, int bits, int sub,"
        " Tensor? channel_scale=None) -> Tensor");
  m.def("weight_pack(Tensor codes, Tensor scale, Tensor? multipliers, int bits) -> Tensor");
  m.def("weight_unpack(Tensor packed, int n, int group, int bits, int sub)"
        " -> (Tensor codes, Tensor scale, Tensor multipliers)");
  m.def("weight_decode(Tensor packed, Tensor signs, Tensor? levels, int n, int bits, int sub, ScalarType dtype,"
        " Tensor? channel_inverse=None) -> Tensor");
  m.def("linear_packed(Tensor x, Tensor packed, Tensor signs, Tensor? levels, int n, int bits, int sub,"
        " Tensor? channel_inverse=None, Tensor? bias=None) -> Tensor");
  m.def("linear_experts(Tensor x, Tensor packed, Tensor experts, Tensor signs, Tensor? levels, int n, int bits, int sub,"
        " Tensor? bias=None) -> Tensor");
}
// clang-format on
