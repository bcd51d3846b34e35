from .encoders import OPTIONAL as OPTIONAL
from .encoders import READ as READ
from .encoders import TEXTS as TEXTS
from .encoders import Encoder as Encoder
from .encoders import words_of as words_of
from .read import FORMATS as FORMATS
from .read import Format as Format
from .read import fitting_format as fitting_format
