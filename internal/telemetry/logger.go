package telemetry

import (
	"io"
	"log/slog"
)

// The log formats.
const (
	FormatText = "text" // key=value lines for people
	FormatJSON = "json" // one object a line for collectors
)

// NewLogger returns the process's logger: JSON for FormatJSON, else text. Recurring fields have fixed names:
// node, room, app, unit, group, rank, epoch, incarnation, request_id, ingress, attempt, cause, code, dur_ms,
// err.
func NewLogger(w io.Writer, format string, level slog.Leveler) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	if format == FormatJSON {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
