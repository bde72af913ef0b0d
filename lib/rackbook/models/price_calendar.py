"""When which price list applies: a weekly rule in one time zone, with holidays."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone

from rackbook.errors import ParameterError

BEIJING = timezone(timedelta(hours=8), "UTC+08:00")
"""China has one clock, eight hours ahead of UTC, and no summer time."""


@dataclass(frozen=True)
class PeakHours:
    """A rule for peak hours.

    Attributes:
        weekdays: Monday is 0.
        hours: spans of whole hours ``(from, to)``; a span includes its first instant and excludes its last.
        holidays: days on which no hour is peak.
        zone: the clock that the rule is read on.
    """

    weekdays: frozenset[int]
    hours: tuple[tuple[int, int], ...]
    holidays: frozenset[date] = frozenset()
    zone: timezone = BEIJING

    def __post_init__(self) -> None:
        if wrong := sorted(day for day in self.weekdays if day not in range(7)):
            raise ParameterError(f"weekdays: got {wrong}, allowed: 0 (Monday) to 6 (Sunday)")
        last = 0
        for start, end in self.hours:
            if not last <= start < end <= 24:
                raise ParameterError(
                    f"hours: got {self.hours}, allowed: spans from 0 to 24, in order, that do not overlap"
                )
            last = end

    def is_peak(self, instant: datetime) -> bool:
        """Whether the peak list applies at an instant.

        Args:
            instant: with a time zone, any.

        Raises:
            ParameterError: the instant has no time zone, so it names no moment.
        """
        there = _moment(instant).astimezone(self.zone)
        if there.weekday() not in self.weekdays or there.date() in self.holidays:
            return False
        return any(start <= there.hour < end for start, end in self.hours)

    def peak_spans(self, day: date) -> list[tuple[datetime, datetime]]:
        """Peak spans of one day of the rule's clock, as instants."""
        if day.weekday() not in self.weekdays or day in self.holidays:
            return []
        midnight = datetime.combine(day, time(), self.zone)
        return [tuple(midnight + timedelta(hours=hour) for hour in span) for span in self.hours]

    def peak_hours_between(self, start: datetime, end: datetime) -> float:
        """Hours of peak between two instants, exact to the microsecond.

        Raises:
            ParameterError: an instant has no time zone, or ``end`` lies before ``start``.
        """
        if _moment(end) < _moment(start):
            raise ParameterError(f"end: got {end.isoformat()}, allowed: not before {start.isoformat()}")
        start, end = start.astimezone(UTC), end.astimezone(UTC)
        day, last = start.astimezone(self.zone).date(), end.astimezone(self.zone).date()
        total = timedelta()
        while day <= last:
            for span_start, span_end in self.peak_spans(day):
                total += max(timedelta(), min(end, span_end) - max(start, span_start))
            day += timedelta(days=1)
        return total / timedelta(hours=1)


def _moment(instant: datetime) -> datetime:
    if instant.utcoffset() is None:
        got = instant.isoformat()
        raise ParameterError(f"instant: got {got} without a time zone, allowed: with one, as in {got}+08:00")
    return instant
