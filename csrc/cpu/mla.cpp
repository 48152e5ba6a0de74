// mla_store, mla_load, mla_attention: latent attention straight from packed pages (docs/format.md section 13).
#include "calls/mla.h"
