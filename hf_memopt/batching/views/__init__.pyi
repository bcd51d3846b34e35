from .bucketed_view import BucketedView as BucketedView
from .bucketed_view import bucketed as bucketed
from .sorted_view import SortedExamples as SortedExamples
from .sorted_view import loses_order as loses_order
from .sorted_view import sorted_by_length as sorted_by_length
from .view import is_map_style as is_map_style
