package ports

import (
	"context"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// listen holds a port as a program of the machine's user does; a port that another program has already will
// do as well.
func listen(t *testing.T, addr string) {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err == nil {
		t.Cleanup(func() { _ = l.Close() })
	}
}

// Programs listen on 18000 and inside two more blocks, on loopback and on every address: no block holds one
// of their ports.
func TestBlocksAvoidPortsThatProgramsListenOn(t *testing.T) {
	listen(t, "127.0.0.1:18000")
	bases := cells()
	run := Take(t, 3*cellSize) // ports that no test beside this one uses
	at := slices.Index(bases, run)
	require.NotEqual(t, -1, at)
	listen(t, address("127.0.0.1", run+cellSize+7))
	listen(t, address("0.0.0.0", run+2*cellSize+cellSize-1))

	assert.True(t, areFree(run, cellSize, []string{Loopback}))
	assert.False(t, areFree(run+cellSize, cellSize, []string{Loopback}))
	assert.False(t, areFree(run+2*cellSize, cellSize, []string{Loopback}),
		"the program listens on every address")
	assert.False(t, areFree(18_000, 1, []string{Loopback}))

	for range 20 {
		base, release, err := Hold(t.Context(), 10*cellSize)
		require.NoError(t, err)
		assert.False(t, base <= 18_000 && 18_000 < base+10*cellSize, "block %d holds port 18000", base)
		release()
	}
}

func TestBlocksAreDisjointAndComeBack(t *testing.T) {
	bases := cells()[:8] // of these as many blocks as fit
	var held []func()
	seen := map[int]bool{}
	for {
		base, release, err := search(t.Context(), bases, cellSize+1, []string{Loopback})
		if err != nil {
			require.ErrorIs(t, err, errNoBlock)
			break
		}
		assert.False(t, seen[base], "block %d is given twice", base)
		seen[base] = true
		held = append(held, release)
	}
	assert.LessOrEqual(t, len(held), 4)
	for _, release := range held {
		release()
	}
	for base := range seen {
		assert.True(t, areFree(base, cellSize+1, []string{Loopback}))
	}
}

func TestNoBlockIsInTheKernelsRange(t *testing.T) {
	lo, hi := ephemeral()
	for _, base := range cells() {
		assert.False(t, base <= hi && lo < base+cellSize, "cell %d", base)
		assert.False(t, base < 30_000 && 20_000 < base+cellSize,
			"cell %d is among the default ports of engines", base)
	}
	assert.LessOrEqual(t, len(cells()), 1000, "every cell has a sign below 20000")
}

// A turn depends on no port: a program may listen on any of them.
func TestATurnWaitsForNoProgram(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir()) // the turns of other test processes do not matter here
	for port := 19_000 + len(cells()); port < 20_000; port++ {
		listen(t, address(Loopback, port))
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	release, err := TakeFixed(ctx)
	require.NoError(t, err)

	busy, giveUp := context.WithCancel(t.Context())
	giveUp()
	_, err = TakeFixed(busy)
	require.ErrorIs(t, err, syscall.EWOULDBLOCK, "one at a time")
	release()
	release, err = TakeFixed(ctx)
	require.NoError(t, err)
	release()
}

// An address that is taken closes connections, until its release.
func TestWhatIsTakenClosesConnections(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir()) // the turns of other test processes do not matter here
	addr := address(Loopback, Take(t, 1))
	release, err := TakeFixed(t.Context(), addr)
	require.NoError(t, err)
	_, err = net.Listen("tcp", addr)
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	_, err = c.Read(make([]byte, 1))
	require.Error(t, err, "nobody answers")
	require.NoError(t, c.Close())
	release()
	listen(t, addr)
}

const childVar = "DPSERVE_TEST_PORTS_CELL"

// A block of one test process is not given to another one, and is free when that process is gone.
func TestAnotherProcessDoesNotGetTheBlock(t *testing.T) {
	run := Take(t, cellSize)
	at := slices.Index(cells(), run)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestChildOwnsACell$", "-test.v")
	cmd.Env = append(os.Environ(), childVar+"="+strconv.Itoa(at))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.Contains(t, string(out), "the cell is owned")
}

// TestChildOwnsACell runs in the process that TestAnotherProcessDoesNotGetTheBlock starts.
func TestChildOwnsACell(t *testing.T) {
	cell := os.Getenv(childVar)
	if cell == "" {
		t.Skip("runs as a child alone")
	}
	at, err := strconv.Atoi(cell)
	require.NoError(t, err)
	release, err := own(t.Context(), at, 1)
	if err != nil {
		t.Log("the cell is owned")
		return
	}
	release()
	t.Fatal("the cell of another process was free")
}

func TestFreeRunPassesOverTakenPorts(t *testing.T) {
	const host = "127.251.77.1" // no other test uses it
	l, err := net.Listen("tcp", host+":20003")
	if err != nil {
		t.Skipf("this machine has no %s: %v", host, err)
	}
	defer func() { _ = l.Close() }()
	assert.Equal(t, 20_004, FreeRun(t, 10, host))
}
