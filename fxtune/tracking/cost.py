"""What a run costs: card-hours and kilowatt-hours, each times its price."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


@dataclass
class CostConfig:
    """Prices, in any one currency. Without prices no cost is shown."""

    card_hour: Optional[float] = field(default=None, metadata={"above": 0})
    """The price of one GPU for an hour (on the CPU: of one process), as clouds have it."""
    kwh: Optional[float] = field(default=None, metadata={"above": 0})
    """The price of a kilowatt-hour, for machines of your own. Only energy that can be read is counted."""

    def of(self, card_seconds: float, joules: float | None) -> float | None:
        """The cost of this time of cards and this energy; None without a price, or if the priced amount is unknown."""
        parts = []
        if self.card_hour is not None:
            parts.append(self.card_hour * card_seconds / 3600)
        if self.kwh is not None and joules is not None:
            parts.append(self.kwh * joules / 3.6e6)
        return sum(parts) if parts else None
