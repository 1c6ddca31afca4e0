"""What goes with what: the combinations of options that a run refuses, and when."""

from keyfed.run.compatible.case import EMBEDDING as EMBEDDING
from keyfed.run.compatible.case import Case as Case
from keyfed.run.compatible.case import Exclusion as Exclusion
from keyfed.run.compatible.table import TABLE as TABLE
from keyfed.run.compatible.table import refuse as refuse
from keyfed.run.compatible.table import threshold_of as threshold_of
