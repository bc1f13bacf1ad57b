"""Two engines in lockstep: the same steps from the same state, compared after each.

The *oracle* plans and runs; the *subject* carries out the same plan under the same
tokens and begins each step from the oracle's state, so that an error is that of one
step alone (``free_running`` lets errors add up instead). Integers are compared exactly,
floats within `compare.BUDGETS`. On a difference the verdict names the first step,
layer, operation, tensor, request and position, and the component to blame: the one of
the subject whose replacement by the oracle's makes the step equal.

    from lockstep.verify import verify

    print(verify("reference", {"scan.scan_decode": my_scan_decode}))

`certify` holds both backends to a third engine, the model code of ``transformers``.
"""

from .certificate import Certificate as Certificate
from .certificate import certify as certify
from .report import Difference as Difference
from .report import Verdict as Verdict
from .report import show as show
from .run import verify as verify
from .sides import Setup as Setup
from .sides import Side as Side
from .workload import Arrival as Arrival
from .workload import Workload as Workload
