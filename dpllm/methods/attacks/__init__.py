"""Attacks on a released model or text: shadow models, extraction, exposure, and audits of query runs."""
