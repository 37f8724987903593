"""Methods of a comparison beside those of `dcar.decoding`, and the families in which a plot groups
them."""

import eval.methods.controls
import eval.verifiers  # noqa: F401  registers its methods
