"""Invertible rules that take unread leaves from one tree to another."""
