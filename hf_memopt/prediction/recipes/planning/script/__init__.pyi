from .folder import RowsFile as RowsFile
from .folder import Written as Written
from .folder import check_folder as check_folder
from .folder import check_splits as check_splits
from .folder import write_plan as write_plan
from .script import script_of as script_of
