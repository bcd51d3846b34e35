from .bucketed_view import bucketed as bucketed
from .sorted_view import sorted_by_length as sorted_by_length
