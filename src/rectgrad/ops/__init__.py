"""Op families and aliases as data, composite calls, and the index arithmetic of windows."""

from rectgrad.ops.table import BY_HAND as BY_HAND
from rectgrad.ops.table import FAMILIES as FAMILIES
from rectgrad.ops.table import LINEAR_CALLS as LINEAR_CALLS
from rectgrad.ops.table import NEW_TENSORS as NEW_TENSORS
from rectgrad.ops.table import OF_ONE as OF_ONE
from rectgrad.ops.table import PLAIN_ATTRIBUTES as PLAIN_ATTRIBUTES
from rectgrad.ops.table import RECTIFIERS as RECTIFIERS
from rectgrad.ops.table import REFINED as REFINED
from rectgrad.ops.table import ROUTING as ROUTING
from rectgrad.ops.table import SIGN_KEEPING as SIGN_KEEPING
from rectgrad.ops.table import SIMPLE as SIMPLE
from rectgrad.ops.table import UNLINKABLE as UNLINKABLE
from rectgrad.ops.table import Spec as Spec
from rectgrad.ops.table import Table as Table
from rectgrad.ops.table import refine as refine
