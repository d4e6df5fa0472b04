"""What the daemon measures of itself, for Prometheus.

The loop counts as it goes, in plain numbers; a scrape has the loop read them all in one go (:mod:`.reading`), and a
thread puts them into words (:mod:`.exposition`, :mod:`.endpoint`). :mod:`.table` names every metric.
"""
