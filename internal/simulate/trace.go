package simulate

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"
)

// MaxRequests bounds how much of a trace is in memory.
const MaxRequests = 1 << 22

const (
	maxLine   = 4 << 20                    // bytes
	maxTokens = 1 << 30                    // of a prompt, and of an answer
	longest   = time.Duration(1 << 62)     // that a workload lasts
	maxSpan   = 100 * 365 * 24 * time.Hour // of timestamps: those that count from 1970 are within it

	azureHeader = "TIMESTAMP,ContextTokens,GeneratedTokens"
	byteOrder   = "\xef\xbb\xbf" // some editors begin a file with it
)

// ErrTrace is a file that is no trace. A LineError is one.
var ErrTrace = errors.New("not a trace")

var (
	errFormat = errors.New("neither a JSON object of Mooncake's format nor the header of an Azure trace, " +
		azureHeader)
	errFields = errors.New("a row has a timestamp, context tokens and generated tokens")
	errTime   = errors.New("timestamps are milliseconds or like 2023-11-16 18:15:46.68, " +
		"and span 100 years at most")
	errTokens  = fmt.Errorf("a prompt has 1 to %d tokens, an answer 0 to %d", maxTokens, maxTokens)
	errLong    = fmt.Errorf("a line has %d bytes at most", maxLine)
	errTooMany = fmt.Errorf("a trace has %d requests at most: read its first ones", MaxRequests)
)

// LineError is a line of a file that is no request of a trace.
type LineError struct {
	Line int // from 1 on
	Err  error
}

// Error implements error.
func (e *LineError) Error() string { return fmt.Sprintf("%v: line %d: %v", ErrTrace, e.Line, e.Err) }

// Unwrap makes it an ErrTrace.
func (e *LineError) Unwrap() []error { return []error{ErrTrace, e.Err} }

// ReadTrace reads a trace: the first requests of the file, or all with most = 0. Its lines are in any order,
// because some recorders write a request when it has ended. The result is in the order of time, and begins at
// 0. cut is the last line, if the file ends within it: it is left out; 0 = none. The first line tells the
// format:
//
//	{"timestamp": 27000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
//
// is Mooncake's, one JSON object per line: milliseconds, tokens, and chained ids of the prompt's blocks of
// BlockSize tokens.
//
//	TIMESTAMP,ContextTokens,GeneratedTokens
//	2023-11-16 18:15:46.6805900,374,44
//
// is that of the Azure LLM inference traces of 2023 and 2024. They say nothing of the prompts, so no two
// share anything.
func ReadTrace(r io.Reader, most int) (out []Request, cut int, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	hasEnd := true
	lines.Split(func(data []byte, atEOF bool) (advance int, line []byte, err error) {
		advance, line, err = bufio.ScanLines(data, atEOF)
		hasEnd = advance == 0 || data[advance-1] == '\n'
		return advance, line, err
	})
	var read func(line []byte) (Request, error)
	n := 0
	for (most <= 0 || len(out) < most) && lines.Scan() {
		n++
		line := bytes.TrimSpace(lines.Bytes())
		if n == 1 {
			line = bytes.TrimPrefix(line, []byte(byteOrder))
		}
		switch {
		case len(line) == 0:
			continue
		case read != nil:
		case string(line) == azureHeader:
			read = new(azureTrace).read
			continue
		case line[0] == '{':
			read = readMooncake
		default:
			return nil, 0, &LineError{n, errFormat}
		}
		q, err := read(line)
		if !hasEnd && len(out) > 0 && isCut(err) {
			cut = n
			break
		}
		if err == nil && len(out) == MaxRequests {
			err = errTooMany
		}
		if err != nil {
			return nil, 0, &LineError{n, err}
		}
		out = append(out, q)
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return nil, 0, &LineError{n + 1, errLong}
	case err != nil:
		return nil, 0, fmt.Errorf("read trace: %w", err)
	case len(out) == 0:
		return nil, 0, fmt.Errorf("%w: there is no request in it", ErrTrace)
	}
	sortByTime(out)
	for i, first := 0, out[0].At; i < len(out); i++ {
		out[i].At -= first
	}
	return out, cut, nil
}

// isCut says that a line would have gone on.
func isCut(err error) bool {
	syntax, ok := errors.AsType[*json.SyntaxError](err)
	return ok && syntax.Error() == "unexpected end of JSON input"
}

func sortByTime(requests []Request) {
	slices.SortStableFunc(requests, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
}

func readMooncake(line []byte) (Request, error) {
	var row struct {
		Timestamp float64  `json:"timestamp"`
		Input     int      `json:"input_length"`
		Output    int      `json:"output_length"`
		Hashes    []uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &row); err != nil {
		return Request{}, err
	}
	if !(row.Timestamp >= 0 && row.Timestamp <= float64(maxSpan/time.Millisecond)) {
		return Request{}, errTime
	}
	q, err := newRequest(row.Input, row.Output)
	q.At = time.Duration(row.Timestamp * float64(time.Millisecond))
	q.Blocks = row.Hashes[:min(len(row.Hashes), q.Prompt/BlockSize)]
	return q, err
}

func newRequest(prompt, output int) (Request, error) {
	if prompt < 1 || prompt > maxTokens || output < 0 || output > maxTokens {
		return Request{}, errTokens
	}
	return Request{Prompt: prompt, Output: max(output, 1)}, nil
}

// azureTrace reads the rows of an Azure LLM inference trace.
type azureTrace struct{ first time.Time }

func (a *azureTrace) read(line []byte) (Request, error) {
	fields := strings.Split(string(line), ",")
	if len(fields) != 3 {
		return Request{}, errFields
	}
	at, err := time.Parse("2006-01-02 15:04:05", fields[0])
	if err != nil {
		at, err = time.Parse("2006-01-02 15:04:05Z07:00", fields[0])
	}
	if err != nil {
		return Request{}, errTime
	}
	if a.first.IsZero() {
		a.first = at
	}
	since := at.Sub(a.first) // as far as a Duration goes
	if since < -maxSpan || since > maxSpan {
		return Request{}, errTime
	}
	prompt, err := strconv.Atoi(fields[1])
	if err != nil {
		return Request{}, errTokens
	}
	output, err := strconv.Atoi(fields[2])
	if err != nil {
		return Request{}, errTokens
	}
	q, err := newRequest(prompt, output)
	q.At = since
	return q, err
}

// Play is the trace at factor times its rate. Where many requests share a timestamp, the timestamps are
// rounded: each such request gets a drawn instant before the next timestamp, or bursts would come of the
// rounding.
func Play(trace []Request, factor float64, seed uint64) []Request {
	rnd := rand.New(rand.NewPCG(seed, 1))
	out := slices.Clone(trace)
	quantum := quantumOf(trace)
	for i := range out {
		at := float64(out[i].At)
		if quantum > 0 {
			at += rnd.Float64() * float64(quantum)
		}
		out[i].At = time.Duration(min(at/factor, float64(longest)))
	}
	sortByTime(out)
	return out
}

// quantumOf is what a trace's timestamps are rounded to; 0 if most differ.
func quantumOf(trace []Request) time.Duration {
	var gaps []time.Duration
	for i := 1; i < len(trace); i++ {
		if gap := trace[i].At - trace[i-1].At; gap > 0 {
			gaps = append(gaps, gap)
		}
	}
	if 2*len(gaps) > len(trace) || len(gaps) == 0 {
		return 0
	}
	slices.Sort(gaps)
	return gaps[len(gaps)/2]
}
