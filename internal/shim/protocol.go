package shim

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/dpserve/dpserve/internal/process"
)

// Version is the version of the protocol that this binary speaks. A node and a shim also speak the one
// before. A shim speaks the version of its spec, and that one only: the node that made the spec knows no
// newer one, and later nodes know it.
const (
	Version = 1
	Oldest  = max(1, Version-1)
)

// Bounds of a line.
const (
	requestLimit = 64 << 10
	replyLimit   = 8 << 20 // Info has the engine's arguments and environment
)

// maxExtend bounds one Extend.
const maxExtend = time.Hour

// hello is the first line of both sides, the shim's first.
type hello struct {
	Version int `json:"dpserve_shim"`
}

func parseHello(line []byte) (hello, error) {
	h, err := parse[hello](line)
	if err == nil && h.Version < 1 {
		err = fmt.Errorf("%w: no version", ErrProtocol)
	}
	return h, err
}

// op names a request.
type op string

// The requests.
const (
	opInfo    op = "info"    // answered by Info
	opWatch   op = "watch"   // makes the caller the owner; answered at once, and with the exit status
	opSignal  op = "signal"  // to the engine
	opExtend  op = "extend"  // mode fence: the engine may live so much longer
	opLogs    op = "logs"    // the engine's lines, on a connection of its own
	opRelease op = "release" // the engine has ended and its end is reported: remove the files and end
)

// request is a line of the node.
type request struct {
	ID     uint64 `json:"id"` // of the replies; 0 = none is wanted
	Op     op     `json:"op"`
	Signal string `json:"signal,omitempty"` // TERM or KILL
	TTL    int64  `json:"ttl_ms,omitempty"`
	Since  uint64 `json:"since,omitempty"` // number of the first line
	Follow bool   `json:"follow,omitempty"`
}

// Signals that a node may send.
const (
	signalTerm = "TERM"
	signalKill = "KILL"
)

func parseRequest(line []byte) (request, error) {
	r, err := parse[request](line)
	if err != nil {
		return r, err
	}
	switch r.Op {
	case opInfo, opWatch, opLogs, opRelease:
	case opSignal:
		if r.Signal != signalTerm && r.Signal != signalKill {
			return r, fmt.Errorf("%w: signal %q", ErrProtocol, r.Signal)
		}
	case opExtend:
		if r.TTL < 0 || r.TTL > maxExtend.Milliseconds() {
			return r, fmt.Errorf("%w: extend by %d ms", ErrProtocol, r.TTL)
		}
	default:
		return r, fmt.Errorf("%w: request %q", ErrProtocol, r.Op)
	}
	return r, nil
}

// reply is a line of the shim.
type reply struct {
	ID     uint64        `json:"id"`
	Error  *refusal      `json:"error,omitempty"`
	Info   *Info         `json:"info,omitempty"`
	Exit   *process.Exit `json:"exit,omitempty"`
	Lines  []Line        `json:"lines,omitempty"`
	Missed uint64        `json:"missed,omitempty"` // lines before Lines that are not held any more
	More   bool          `json:"more,omitempty"`   // another reply to the request follows
}

// parse reads a message of the other side.
func parse[message any](line []byte) (m message, err error) {
	if err = json.Unmarshal(line, &m); err != nil {
		err = fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	return m, err
}

// writeLine writes a message as one line.
func writeLine(w io.Writer, message any) error {
	line, err := json.Marshal(message)
	if err != nil {
		return err
	}
	_, err = w.Write(append(line, '\n'))
	return err
}

// readLine reads a line of at most limit bytes, without its end.
func readLine(r *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case len(line) > limit:
			return nil, fmt.Errorf("%w: a line of more than %d bytes", ErrProtocol, limit)
		case err == nil:
			return line[:len(line)-1], nil
		case err != bufio.ErrBufferFull: //nolint:errorlint // bufio returns it as it is
			return nil, err
		}
	}
}

// What a node may find in the folder of a shim, or be told by one.
var (
	ErrGone     = errors.New("the shim has ended")
	ErrForeign  = errors.New("the socket belongs to another user or process")
	ErrCopy     = errors.New("the folder is a copy of the one in which the engine was started")
	ErrSilent   = errors.New("the shim does not answer")
	ErrOwned    = errors.New("another process owns the engine")
	ErrRunning  = errors.New("the engine has not ended")
	ErrProtocol = errors.New("not what a shim says")
)

// VersionError says that a shim speaks a version of the protocol that this binary does not know.
type VersionError struct {
	Shim int
}

// Error implements error.
func (e *VersionError) Error() string {
	return fmt.Sprintf("the shim speaks version %d of the protocol, this dpserve speaks %d to %d", e.Shim,
		Oldest, Version)
}

// codes are the words of the errors that a shim answers with.
var codes = map[string]error{
	"owned":    ErrOwned,
	"running":  ErrRunning,
	"protocol": ErrProtocol,
	"foreign":  ErrForeign,
}

// refusal is an error in an answer.
type refusal struct {
	Code string `json:"code"`
	Text string `json:"text,omitempty"`
}

func refuse(err error) *refusal {
	for code, known := range codes {
		if errors.Is(err, known) {
			return &refusal{Code: code, Text: err.Error()}
		}
	}
	return &refusal{Code: "failed", Text: err.Error()}
}

func (r *refusal) err() error {
	if known := codes[r.Code]; known != nil {
		return known
	}
	return fmt.Errorf("shim: %s: %s", r.Code, r.Text)
}
