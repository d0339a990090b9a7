"""Context parallelism: the tokens of a sequence dealt to many ranks, attention still exact."""

from .api import context_parallel_attention as context_parallel_attention
from .api import context_parallel_attention_partial as context_parallel_attention_partial
from .api import context_parallel_prepare as context_parallel_prepare
from .api import explain_schedule as explain_schedule
from .choice import ScheduleChoice as ScheduleChoice
from .comm import Traffic as Traffic
from .comm import count_traffic as count_traffic
from .decode import context_parallel_decode as context_parallel_decode
from .layout import Layout as Layout
from .layout import Segment as Segment
from .layout import balanced as balanced
from .layout import contiguous as contiguous
from .layout import document_zigzag as document_zigzag
from .layout import striped as striped
from .layout import zigzag as zigzag
from .unshard import unshard as unshard
