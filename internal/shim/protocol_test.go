package shim

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/process"
)

func TestRequests(t *testing.T) {
	for line, want := range map[string]request{
		`{"id":1,"op":"info"}`:                         {ID: 1, Op: opInfo},
		`{"id":2,"op":"watch","later":true}`:           {ID: 2, Op: opWatch},
		`{"op":"signal","signal":"TERM"}`:              {Op: opSignal, Signal: signalTerm},
		`{"op":"extend","ttl_ms":3600000}`:             {Op: opExtend, TTL: 3_600_000},
		`{"id":3,"op":"logs","since":9,"follow":true}`: {ID: 3, Op: opLogs, Since: 9, Follow: true},
		`{"id":18446744073709551615,"op":"release"}`:   {ID: 1<<64 - 1, Op: opRelease},
	} {
		got, err := parseRequest([]byte(line))
		require.NoError(t, err, line)
		assert.Equal(t, want, got)
	}
	for _, bad := range []string{
		"", "{}", "[]", "null", `{"op":"info"`, `{"id":-1,"op":"info"}`, `{"op":"restart"}`,
		`{"op":"signal"}`, `{"op":"signal","signal":"HUP"}`, `{"op":"extend","ttl_ms":-1}`,
		`{"op":"extend","ttl_ms":3600001}`, `{"op":"logs","since":-1}`,
	} {
		_, err := parseRequest([]byte(bad))
		assert.ErrorIs(t, err, ErrProtocol, bad)
	}
}

func TestHello(t *testing.T) {
	h, err := parseHello([]byte(`{"dpserve_shim":7,"more":"later"}`))
	require.NoError(t, err)
	assert.Equal(t, 7, h.Version)
	for _, bad := range []string{
		"", "{}", "HTTP/1.1 400 Bad Request", `{"dpserve_shim":0}`,
		`{"dpserve_shim":"1"}`,
	} {
		_, err := parseHello([]byte(bad))
		assert.ErrorIs(t, err, ErrProtocol, bad)
	}
}

func TestErrorsTravel(t *testing.T) {
	for _, known := range []error{ErrOwned, ErrRunning, ErrProtocol, ErrForeign} {
		require.ErrorIs(t, refuse(known).err(), known)
	}
	require.EqualError(t, refuse(errors.New("no room")).err(), "shim: failed: no room")
	require.EqualError(t, (&refusal{Code: "of a later version", Text: "why"}).err(),
		"shim: of a later version: why")
	require.EqualError(t, &VersionError{7},
		"the shim speaks version 7 of the protocol, this dpserve speaks 1 to 1")
}

func TestReadLine(t *testing.T) {
	r := bufio.NewReaderSize(strings.NewReader("one\n"+strings.Repeat("x", 40)+"\nlast"), 16)
	line, err := readLine(r, 40)
	require.NoError(t, err)
	assert.Equal(t, "one", string(line))
	_, err = readLine(r, 40)
	require.ErrorIs(t, err, ErrProtocol, "the end of the line counts")
	r = bufio.NewReaderSize(strings.NewReader(strings.Repeat("x", 40)+"\nlast"), 16)
	line, err = readLine(r, 41)
	require.NoError(t, err)
	assert.Len(t, line, 40)
	_, err = readLine(r, 41)
	require.ErrorIs(t, err, io.EOF, "a line without its end is none")
}

// The files that a shim leaves are read by later versions of dpserve, and the protocol is spoken with them:
// the names stay.
func TestNamesStay(t *testing.T) {
	spec := Spec{
		Version: 1, Cluster: "c", Node: "n", Boot: "b", ID: "a.1", Path: "/bin/engine",
		Argv: []string{"engine"}, Env: []string{"A=1"}, Dir: "/", Output: "/out.log",
		Orphan: 1, Lease: 2, Grace: 3, Order: json.RawMessage(`{"unit":"u"}`),
	}
	text, err := json.Marshal(&spec)
	require.NoError(t, err)
	assert.JSONEq(t, `{"version":1,"cluster":"c","node":"n","boot":"b","id":"a.1","path":"/bin/engine",`+
		`"argv":["engine"],"env":["A=1"],"dir":"/","output":"/out.log","orphan_timeout_ns":1,"lease_ns":2,`+
		`"grace_ns":3,"order":{"unit":"u"}}`, string(text))
	again, err := parseSpec(text)
	require.NoError(t, err)
	assert.Equal(t, spec, again)

	text, err = json.Marshal(&reply{ID: 1, Info: &Info{State: State{
		Launch: process.Launch{Boot: "b", Cgroup: "/c", Shim: 2, ShimStart: "4", PID: 3, Start: "5"},
		Folder: Folder{6, 7}, Began: time.Unix(5, 0).UTC(), Phase: Exited, Reason: "r",
		Exit: &process.Exit{Code: -1, Signal: "killed", After: 6},
	}}, Lines: []Line{{Number: 7, At: 8, Stream: Stdout, Text: "t"}}, Missed: 9, More: true})
	require.NoError(t, err)
	assert.Contains(t, string(text), `"state":{"boot":"b","cgroup":"/c","shim":2,"shim_start":"4","pid":3,`+
		`"start":"5","folder":{"device":6,"inode":7},"began":"1970-01-01T00:00:05Z",`+
		`"phase":"exited","reason":"r","exit":{"code":-1,"signal":"killed","after_ns":6}},"read":0},`+
		`"lines":[{"n":7,"at":8,"s":"stdout","t":"t"}],"missed":9,"more":true}`)
}

func TestDamagedSpecs(t *testing.T) {
	good := `{"version":1,"id":"a.1","path":"/bin/engine","argv":["engine"]}`
	_, err := parseSpec([]byte(good))
	require.NoError(t, err)
	for _, bad := range []string{
		"", "{}", "null", good[:20], strings.Replace(good, "a.1", "..", 1),
		strings.Replace(good, "a.1", "a/b", 1),
		strings.Replace(good, `"version":1,`, "", 1), strings.Replace(good, `["engine"]`, "[]", 1),
		strings.Replace(good, `"version"`, `"grace_ns":-1,"version"`, 1),
	} {
		_, err := parseSpec([]byte(bad))
		assert.ErrorIs(t, err, errDamaged, bad)
	}
}

// FuzzRequest: what a shim reads is refused or within bounds.
func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"id":1,"op":"signal","signal":"KILL"}`))
	f.Add([]byte(`{"op":"extend","ttl_ms":10}`))
	f.Add([]byte(`{"dpserve_shim":1}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		_, _ = parseHello(line)
		r, err := parseRequest(line)
		if err != nil {
			if !errors.Is(err, ErrProtocol) {
				t.Fatal(err)
			}
			return
		}
		if r.TTL < 0 || r.Op == opExtend && r.TTL > maxExtend.Milliseconds() {
			t.Fatalf("out of bounds: %+v", r)
		}
	})
}

// FuzzReply: what a node reads from a shim, or from a file of one, is refused or used without a panic.
func FuzzReply(f *testing.F) {
	f.Add([]byte(`{"id":1,"exit":{"code":7}}`))
	f.Add([]byte(`{"id":1,"error":{"code":"owned"},"lines":[{"n":1,"s":"stdout","t":"x"}],"more":true}`))
	f.Add([]byte(`{"version":1,"id":"a.1","path":"/bin/engine","argv":["engine"]}`))
	f.Add([]byte("2026-01-01T00:00:00Z stdout text\n"))
	f.Fuzz(func(t *testing.T, line []byte) {
		got, err := readLine(bufio.NewReaderSize(bytes.NewReader(line), 16), 100)
		if err == nil && len(got) > 100 {
			t.Fatal("a line over the limit")
		}
		_, _ = parseFileLine(string(line))
		if s, err := parseSpec(line); err == nil && s.check() != nil {
			t.Fatal("a damaged spec")
		}
		r, err := parse[reply](line)
		if err != nil {
			return
		}
		_ = exitOf(r)
		if _, err := answered(r); (err != nil) != (r.Error != nil) {
			t.Fatal("an error is lost")
		}
	})
}
