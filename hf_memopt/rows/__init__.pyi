from .encoders import OPTIONAL as OPTIONAL
from .encoders import READ as READ
from .encoders import TEXTS as TEXTS
from .encoders import Encoder as Encoder
from .encoders import words_of as words_of
from .formats import Format as Format
from .formats import fitting_format as fitting_format
