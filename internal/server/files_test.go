package server

import (
	"bytes"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/assert"
)

// RP37: limits of open files from 256 to 2^63, 4 slots: 16,000 connections from 32,320 files on; below, half
// of what is left beside the reserve, and never less than an eighth; one line, a warning below 1,000
// connections.
func TestMaxConnsFollowsTheLimitOfOpenFiles(t *testing.T) {
	const text = ` msg="the limit of open files allows fewer client connections; ` +
		`raise it (ulimit -n, LimitNOFILE)" `
	for limit, want := range map[uint64]struct {
		conns int
		log   string
	}{
		1 << 63:      {16_000, ""},
		32_256 + 64:  {16_000, ""},
		32_256 + 62:  {15_999, "level=INFO" + text + "limit=32318 reserved=320 connections=15999"},
		2*1000 + 320: {1000, "level=INFO" + text + "limit=2320 reserved=320 connections=1000"},
		1024:         {352, "level=WARN" + text + "limit=1024 reserved=320 connections=352"},
		256:          {32, "level=WARN" + text + "limit=256 reserved=320 connections=32"},
	} {
		var buf bytes.Buffer
		log := slog.New(slog.NewTextHandler(&buf, &slog.HandlerOptions{
			ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
				if a.Key == slog.TimeKey {
					return slog.Attr{}
				}
				return a
			},
		}))
		assert.Equal(t, want.conns, maxConns(log, limit, 4), "limit %d", limit)
		if want.log != "" {
			want.log += " wanted_limit=32320\n"
		}
		assert.Equal(t, want.log, buf.String(), "limit %d", limit)
	}
}
