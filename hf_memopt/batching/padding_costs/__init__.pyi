from .data_files import DataFile as DataFile
from .data_files import data_file as data_file
from .data_files import file_lengths as file_lengths
from .figures import padding_report as padding_report
from .output import print_report as print_report
