/* The operations of a decoding step on a CPU, in float32, and those of the vocoder: what native.py compiles.
 *
 * A step of a small model consists of hundreds of operators that take longer to be called than to compute, and matrix
 * libraries are made for many rows. Here a step is a few calls, and a weight that is in a register meets up to MAX_ROWS
 * rows. The mathematics is that of the PyTorch modules, up to the rounding of sums. A row's result does not depend on
 * the other rows, nor on the number of threads. Functions return 1 (or -1) if there is no memory.
 */
#include "vectors.h"
#include "linear.c"
#include "layers.c"
#include "heads.c"
#include "chunk_scorer.c"
#include "distributions.c"
#include "vocoder.c"
