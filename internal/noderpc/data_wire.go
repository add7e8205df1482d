package noderpc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// Header fields of the data port, in canonical form. All of them begin with dataPrefix. The ingress drops
// fields of clients with this prefix, and the data port drops those of engines.
const (
	dataPrefix = rankleg.OwnPrefix

	dataFields = "Dpserve-Fields" // of a request: all its fields in one, because each has its price

	dataRefused = "Dpserve-Refused" // answer: the reason why there is no ticket
	dataCause   = "Dpserve-Cause"   // answer: the reason why there is no answer of the engine
	dataEpoch   = "Dpserve-Epoch"
	dataSeq     = "Dpserve-Seq"
	dataTicket  = "Dpserve-Ticket"
	dataInc     = "Dpserve-Incarnation"
	dataResent  = "Dpserve-Resent"
	dataLength  = "Dpserve-Length" // the engine's Content-Length: every answer with a body is chunked
	dataBroken  = "Dpserve-Broken" // trailer: the body is not whole, because the engine broke off
)

// The fields of a request, in dataFields.
const (
	fieldApp        = "app"
	fieldUnit       = "unit"
	fieldRank       = "rank" // GROUP/RANK
	fieldClass      = "class"
	fieldIngress    = "ingress"
	fieldReq        = "req"
	fieldEpoch      = "epoch"
	fieldInc        = "inc" // of the rank, in classHeld
	fieldTokens     = "tokens"
	fieldEstimated  = "estimated" // 1: the tokens are estimated as bytes / k
	fieldWhole      = "whole"     // 1: the answer comes as a whole
	fieldWeight     = "weight"    // sequences, if more than one
	fieldHit        = "hit"
	fieldHitBlocks  = "hit-blocks"
	fieldBlocks     = "blocks"         // number of hashes before the body, 8 bytes each, little endian
	fieldSession    = "session"        // a hash
	fieldDeadline   = "deadline-ms"    // the time left, because the clocks differ
	fieldFirstToken = "first-token-ms" // the time left for the engine's header
	fieldOnce       = "once"           // 1: the request is not sent twice to the engine
	fieldWriteBy    = "write-by-ms"    // the time in which the request may be written to the engine
	fieldTarget     = "target"         // path and query at the engine, escaped, of targetPathOf
	fieldModel      = "model"          // the engine's name of the adapter, escaped
	fieldPlain      = "plain"          // 1: the body is no JSON object
)

// holdPath is the path of a request for a ticket alone.
const holdPath = "/dpserve/hold"

// resetPath is the path of a request that drops the prefix cache of a rank's engine, in classNone.
const resetPath = "/dpserve/reset_cache"

// The paths of a request that goes to the engine's path in fieldTarget, by POST, by GET and by DELETE.
const (
	passPath   = "/dpserve/pass"
	readPath   = "/dpserve/read"
	deletePath = "/dpserve/delete"
)

// targetPathOf is the path of a request of a route that has no path of its own on the data port.
func targetPathOf(r openai.Route) string {
	switch r.Method() {
	case http.MethodGet:
		return readPath
	case http.MethodDelete:
		return deletePath
	}
	return passPath
}

// The classes of a request.
const (
	classBoth = "both" // a request and its ticket
	classHold = "hold" // a ticket that lives as long as the stream
	classHeld = "held" // a request whose ticket is that of another stream
	classNone = "none" // a request that needs no ticket
)

// The causes of a data port's own answers.
const (
	causeRefused    = "refused"     // the engine took no connection
	causeNoFiles    = "no_files"    // this node has no file left for a connection
	causeBadAnswer  = "bad_answer"  // the engine's answer is no well-formed HTTP
	causeReset      = "reset"       // the engine broke off before it answered
	causeFirstToken = "first_token" // its head did not come in time
	causeTooLate    = "too_late"    // the time to write the request was over: nothing was written
	causeNotResent  = "not_resent"  // the engine had closed the idle connection, and the request is sent once
	causeDenied     = "denied"      // the caller may not send this request
	causeMalformed  = "malformed"
	causeTooLarge   = "too_large"
)

// Bounds of the fields of a request.
const (
	maxDataName   = 512 // bytes of an application's, unit's or ingress's name
	maxDataTarget = 3 * openai.MaxTarget
	maxDataModel  = 4 << 10 // bytes of an adapter's name, escaped
	maxDataBlocks = 1 << 20 // chain hashes of a prompt
	hashBytes     = 8

	usualFields = 256 // bytes of dataFields; more cost an allocation
	maxFields   = 32
)

// dataHead is the content of a request's header.
type dataHead struct {
	app, unit  string
	rank       routing.RankID
	class      string
	route      openai.Route // NoRoute in classHold, and with isReset
	isReset    bool         // the path is resetPath
	target     string       // of targetPathOf
	model      string       // the engine's name of it; "": as in the body
	isPlain    bool
	admit      msg.Admit // without Ctx, Blocks and Reply; the zero value in classNone and classHeld
	blocks     int
	firstToken time.Duration // 0: no bound

	incarnation uint64        // of the rank, in classHeld
	once        bool          // the request is not sent twice
	writeBy     time.Duration // 0: no bound
}

// writeHead writes a request for a rank into the header of its HTTP request: the port's own fields in one.
// The engine's fields share their values with q.
func writeHead(q *rankleg.Request, isHold bool, now time.Time) http.Header {
	h := make(http.Header, len(q.Header)+1)
	for name, values := range q.Header {
		if !strings.HasPrefix(name, dataPrefix) {
			h[name] = values
		}
	}
	f := fieldWriter(make([]byte, 0, usualFields))
	f.set(fieldApp, q.Rank.App)
	f.set(fieldUnit, q.Rank.Unit)
	f.set(fieldRank, q.Rank.ID.String())
	f.set(fieldClass, classOf(q, isHold))
	if q.FirstToken > 0 {
		f.duration(fieldFirstToken, q.FirstToken)
	}
	if q.Target != "" && !isHold {
		f.set(fieldTarget, url.QueryEscape(q.Target))
	}
	if q.Model != "" {
		f.set(fieldModel, url.QueryEscape(q.Model))
	}
	if q.IsPlain {
		f.set(fieldPlain, "1")
	}
	if q.Admit != nil {
		f.admit(q.Admit, now)
	}
	if q.IsHeld {
		f.number(fieldInc, q.Rank.Incarnation)
	}
	if q.Guard != nil {
		f.set(fieldOnce, "1")
		if q.Guard.TimeLeft != nil {
			f.duration(fieldWriteBy, q.Guard.TimeLeft())
		}
	}
	h[dataFields] = []string{string(f)}
	return h
}

func classOf(q *rankleg.Request, isHold bool) string {
	switch {
	case isHold:
		return classHold
	case q.IsHeld:
		return classHeld
	case q.Admit == nil:
		return classNone
	default:
		return classBoth
	}
}

// fieldWriter writes fields as NAME=VALUE and a semicolon, which no name of an application, a unit or a node
// has.
type fieldWriter []byte

func (f *fieldWriter) set(name, value string) {
	*f = append(append(append(append(*f, name...), '='), value...), ';')
}

func (f *fieldWriter) number(name string, n uint64) {
	*f = append(strconv.AppendUint(append(append(*f, name...), '='), n, 10), ';')
}

func (f *fieldWriter) count(name string, n int) { f.number(name, uint64(max(n, 0))) }

func (f *fieldWriter) duration(name string, d time.Duration) {
	f.count(name, int(max(d.Round(time.Millisecond)/time.Millisecond, 1)))
}

func (f *fieldWriter) admit(m *msg.Admit, now time.Time) {
	f.set(fieldIngress, m.Ingress)
	f.number(fieldReq, m.ReqID)
	f.number(fieldEpoch, m.Epoch)
	f.count(fieldTokens, m.Tokens)
	if m.Estimated {
		f.set(fieldEstimated, "1")
	}
	if m.Whole {
		f.set(fieldWhole, "1")
	}
	if m.Weight > 1 {
		f.count(fieldWeight, m.Weight)
	}
	if len(m.Blocks) > 0 {
		f.count(fieldHit, m.Hit)
		f.count(fieldHitBlocks, m.HitBlocks)
		f.count(fieldBlocks, len(m.Blocks))
	}
	if m.Session != 0 {
		f.number(fieldSession, m.Session)
	}
	if !m.Deadline.IsZero() {
		f.duration(fieldDeadline, m.Deadline.Sub(now))
	}
}

// fieldReader reads the fields of a request and keeps the first error.
type fieldReader struct {
	fields [maxFields]field
	n      int // of fields
	err    error
}

type field struct{ name, value string }

// unpack reads dataFields.
func (r *fieldReader) unpack(h http.Header) {
	v := h[dataFields]
	if len(v) != 1 {
		r.fail(dataFields)
		return
	}
	for rest := v[0]; rest != ""; {
		var next string
		next, rest, _ = strings.Cut(rest, ";")
		name, value, ok := strings.Cut(next, "=")
		if !ok || r.n == maxFields {
			r.fail(dataFields)
			return
		}
		r.fields[r.n] = field{name, value}
		r.n++
	}
}

// find returns a field's value, and how often the field is there.
func (r *fieldReader) find(name string) (value string, count int) {
	for i := range r.n {
		if f := &r.fields[i]; f.name == name {
			value, count = f.value, count+1
		}
	}
	return value, count
}

func (r *fieldReader) text(name string) string { return r.upTo(name, maxDataName) }

func (r *fieldReader) upTo(name string, most int) string {
	v, count := r.find(name)
	if count == 1 && v != "" && len(v) <= most {
		return v
	}
	r.fail(name)
	return ""
}

// number is optional: 0 without the field.
func (r *fieldReader) number(name string, bits int) uint64 {
	v, count := r.find(name)
	if count == 0 {
		return 0
	}
	n, err := strconv.ParseUint(v, 10, bits)
	if err != nil || count > 1 {
		r.fail(name)
		return 0
	}
	return n
}

// count is a number that fits an int32.
func (r *fieldReader) count(name string) int { return int(r.number(name, 31)) }

func (r *fieldReader) duration(name string) time.Duration {
	return time.Duration(r.count(name)) * time.Millisecond
}

func (r *fieldReader) fail(name string) {
	if r.err == nil {
		r.err = fmt.Errorf("the field %s is missing or malformed", name)
	}
}

// readHead reads the header of a request to path.
func readHead(h http.Header, path string, now time.Time) (*dataHead, error) {
	r := fieldReader{}
	r.unpack(h)
	d := &dataHead{
		app: r.text(fieldApp), unit: r.text(fieldUnit), class: r.text(fieldClass),
		firstToken: r.duration(fieldFirstToken), once: r.number(fieldOnce, 1) == 1,
		writeBy: r.duration(fieldWriteBy),
	}
	var ok bool
	if d.rank, ok = rankleg.ParseRankID(r.text(fieldRank)); !ok {
		r.fail(fieldRank)
	}
	if err := d.readRoute(&r, path); err != nil {
		return nil, err
	}
	if _, count := r.find(fieldModel); count > 0 {
		var err error
		if d.model, err = url.QueryUnescape(r.upTo(fieldModel, maxDataModel)); err != nil {
			r.fail(fieldModel)
		}
	}
	switch d.class {
	case classBoth, classHold:
		d.readAdmit(&r, now)
	case classHeld:
		d.incarnation = r.number(fieldInc, 64)
	case classNone:
	default:
		r.fail(fieldClass)
	}
	if d.blocks > maxDataBlocks || d.admit.HitBlocks > d.blocks {
		r.fail(fieldBlocks)
	}
	return d, r.err
}

// readRoute reads what the engine is asked.
func (d *dataHead) readRoute(r *fieldReader, path string) (err error) {
	switch {
	case d.class == classHold:
		return nil
	case path == resetPath && d.class == classNone:
		d.isReset = true
		return nil
	case path == passPath, path == readPath, path == deletePath:
		switch d.route = openai.Other; path {
		case readPath:
			d.route = openai.OtherRead
		case deletePath:
			d.route = openai.ResponseDelete
		}
		d.isPlain = r.number(fieldPlain, 1) == 1
		d.target, err = url.QueryUnescape(r.upTo(fieldTarget, maxDataTarget))
		if err == nil && !strings.HasPrefix(d.target, "/") {
			r.fail(fieldTarget)
		}
		return err
	}
	d.route = openai.RouteOf(path)
	if d.route == openai.NoRoute || d.route > openai.Models || d.route.Method() != http.MethodPost {
		return errors.New("there is no such route")
	}
	return nil
}

func (d *dataHead) readAdmit(r *fieldReader, now time.Time) {
	d.admit = msg.Admit{
		ReqID: r.number(fieldReq, 64), Epoch: r.number(fieldEpoch, 64), Tokens: r.count(fieldTokens),
		Estimated: r.number(fieldEstimated, 1) == 1, Whole: r.number(fieldWhole, 1) == 1,
		Weight: r.count(fieldWeight),
		Hit:    r.count(fieldHit), HitBlocks: r.count(fieldHitBlocks), Ingress: r.text(fieldIngress),
		Session: r.number(fieldSession, 64),
	}
	d.blocks = r.count(fieldBlocks)
	if left := r.duration(fieldDeadline); left > 0 {
		d.admit.Deadline = now.Add(left)
	}
}

// appendBlocks appends the chain hashes that precede a body.
func appendBlocks(dst []byte, blocks []uint64) []byte {
	for _, b := range blocks {
		dst = binary.LittleEndian.AppendUint64(dst, b)
	}
	return dst
}

// takeBlocks reads n hashes from the front of b; ok is false if there are fewer.
func takeBlocks(dst []uint64, b []byte, n int) (blocks []uint64, rest []byte, ok bool) {
	if n > len(b)/hashBytes {
		return dst, nil, false
	}
	for range n {
		dst = append(dst, binary.LittleEndian.Uint64(b))
		b = b[hashBytes:]
	}
	return dst, b, true
}

// refusalOf is the refusal with a name; a name that this build does not know counts as not ready.
func refusalOf(name string) msg.Refusal {
	for r := msg.Full; r <= msg.Overloaded; r++ {
		if r.String() == name {
			return r
		}
	}
	return msg.NotReady
}
