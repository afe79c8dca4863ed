"""The technique `quantize`: a frozen base in 4 or 8 bits."""
