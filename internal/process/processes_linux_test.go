package process

import (
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestStatLines(t *testing.T) {
	s, ok := ReadStat(os.Getpid())
	assert.True(t, ok)
	group, err := syscall.Getpgid(0)
	require.NoError(t, err)
	assert.Equal(t, group, s.Group)
	assert.False(t, s.Zombie)
	assert.False(t, s.Exiting)
	assert.NotEmpty(t, s.Start)

	// A process may have any name.
	s, ok = parseStat(7, "7 (VLLM) Z 1 99 (x) S 1 42 42 0 -1 4 1 2 3 4 5 6 7 8 20 0 1 0 12345 1 2 3")
	assert.True(t, ok)
	assert.Equal(t, Stat{
		PID: 7, Parent: 1, Group: 42, Exiting: true, Start: "12345", CPU: 110 * time.Millisecond,
	}, s)
}

// The limit of open files is that of a process, or of this one.
func TestFileLimit(t *testing.T) {
	own, ok := FileLimit(0)
	assert.True(t, ok)
	assert.Positive(t, own)
	same, ok := FileLimit(os.Getpid())
	assert.True(t, ok)
	assert.Equal(t, own, same)
	_, ok = FileLimit(-1)
	assert.False(t, ok)
}

// FuzzParseStat: incomplete and strange lines are refused without a panic.
func FuzzParseStat(f *testing.F) {
	f.Add("7 (a) Z 1 42 42 0 -1 4 1 2 3 4 5 6 7 8 20 0 1 0 12345 1 2 3")
	f.Add(")")
	f.Add("")
	f.Fuzz(func(t *testing.T, line string) {
		if s, ok := parseStat(1, line); ok && s.Start == "" {
			t.Fatal("accepted without a start time")
		}
	})
}

func TestListeningPortsOfThisProcess(t *testing.T) {
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	assert.Contains(t, ListeningPorts(os.Getpid()), port)
	require.NoError(t, l.Close())
	assert.NotContains(t, ListeningPorts(os.Getpid()), port)
}

func TestParseSockets(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000    0 41 1 0 100 0 0 10 0
   1: 0100007F:1F41 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000    0 42 1 0 20 4 30 10 -1
   2: 00000000:2049 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0    0 43 1 0 100 0 0 10 0
   3: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 44 1
   4: nonsense
   5: 0100007F:XYZ 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 45
`
	assert.Equal(t, []Socket{
		{netip.MustParseAddr("127.0.0.1"), 8000, "41"},
		{netip.MustParseAddr("0.0.0.0"), 8265, "43"},
		{netip.IPv6Loopback(), 80, "44"},
	}, parseSockets(table, stateListen))
	assert.Len(t, parseSockets(table, "01"), 1)
}

// FuzzParseSockets: any table gives ports only.
func FuzzParseSockets(f *testing.F) {
	const line = "  0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000  0 42 1 0"
	f.Add("  sl  local_address rem_address\n" + line)
	f.Add(line + "\n" + line[:40])
	f.Add(" 0: 0100007F:1F40 00000000:0000 0A 0:0 00:0 0 0 0 41 1\n")
	f.Fuzz(func(t *testing.T, table string) {
		for _, s := range parseSockets(table, stateListen) {
			if s.Port < 0 || s.Port > 65535 || !s.Host.IsValid() {
				t.Fatal(s)
			}
		}
	})
}
