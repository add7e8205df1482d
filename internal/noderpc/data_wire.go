package noderpc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
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

	dataApp        = "Dpserve-App"
	dataUnit       = "Dpserve-Unit"
	dataRank       = "Dpserve-Rank" // GROUP/RANK
	dataClass      = "Dpserve-Class"
	dataIngress    = "Dpserve-Ingress"
	dataReq        = "Dpserve-Req"
	dataTokens     = "Dpserve-Tokens"    //nolint:gosec // a field's name
	dataEstimated  = "Dpserve-Estimated" // 1: Tokens is estimated as bytes / k
	dataWhole      = "Dpserve-Whole"     // 1: the answer comes as a whole
	dataWeight     = "Dpserve-Weight"    // sequences, if more than one
	dataHit        = "Dpserve-Hit"
	dataHitBlocks  = "Dpserve-Hit-Blocks"
	dataBlocks     = "Dpserve-Blocks"         // number of hashes before the body, 8 bytes each, little endian
	dataSession    = "Dpserve-Session-Key"    // a hash
	dataDeadline   = "Dpserve-Deadline-Ms"    // the time left, because the clocks differ
	dataFirstToken = "Dpserve-First-Token-Ms" // the time left for the engine's header
	dataOnce       = "Dpserve-Once"           // 1: the request is not sent twice to the engine
	dataWriteBy    = "Dpserve-Write-By-Ms"    // the time in which the request may be written to the engine

	dataRefused = "Dpserve-Refused" // answer: the reason why there is no ticket
	dataCause   = "Dpserve-Cause"   // answer: the reason why there is no answer of the engine
	dataEpoch   = "Dpserve-Epoch"   // of the request, and of an answer
	dataSeq     = "Dpserve-Seq"
	dataTicket  = "Dpserve-Ticket"
	dataInc     = "Dpserve-Incarnation" // of an answer, and of a request in classHeld
	dataResent  = "Dpserve-Resent"
	// with the cause reset, because older nodes read only the cause
	dataMalformed = "Dpserve-Malformed"

	// All fields of a request in one, as NAME=VALUE; without the prefix, because each field has its price.
	// Nodes that serve HTTP/1.1 read it.
	dataFields = "Dpserve-Fields"

	// over HTTP/1.1, where every answer with a body is chunked
	dataLength = "Dpserve-Length" // the engine's Content-Length
	dataBroken = "Dpserve-Broken" // trailer: the body is not whole, because the engine broke off
)

// holdPath is the path of a request for a ticket alone.
const holdPath = "/dpserve/hold"

// resetPath is the path of a request that drops the prefix cache of a rank's engine, in classNone.
const resetPath = "/dpserve/reset_cache"

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
	causeReset      = "reset"       // the engine broke off before it answered
	causeFirstToken = "first_token" // its head did not come in time
	causeTooLate    = "too_late"    // the time to write the request was over: nothing was written
	causeNotResent  = "not_resent"  // the engine had closed the idle connection, and dataOnce was set
	causeDenied     = "denied"      // the caller may not send this request
	causeMalformed  = "malformed"
	causeTooLarge   = "too_large"
)

// Bounds of the fields of a request.
const (
	maxDataName   = 512     // bytes of an application's, unit's or ingress's name
	maxDataBlocks = 1 << 20 // chain hashes of a prompt
	hashBytes     = 8

	usualFields = 12 // of a request; more cost an allocation
	usualPacked = 256
	maxPacked   = 32 // fields in one
)

// dataHead is the content of a request's header.
type dataHead struct {
	app, unit  string
	rank       routing.RankID
	class      string
	route      openai.Route // NoRoute in classHold, and with isReset
	isReset    bool         // the path is resetPath
	admit      msg.Admit    // without Ctx, Blocks and Reply; the zero value in classNone and classHeld
	blocks     int
	firstToken time.Duration // 0: no bound

	incarnation uint64        // of the rank, in classHeld
	once        bool          // the request is not sent twice
	writeBy     time.Duration // 0: no bound
}

// writeHead writes a request for a rank into the header of its HTTP request. The engine's fields share their
// values with q. isPacked puts the port's own fields into one.
func writeHead(q *rankleg.Request, isHold, isPacked bool, now time.Time) http.Header {
	f := headerWriter{isPacked: isPacked && canBePacked(q)}
	n := usualFields
	if f.isPacked {
		n = 1
		f.packed = make([]byte, 0, usualPacked)
	}
	h := make(http.Header, len(q.Header)+n)
	for name, values := range q.Header {
		if !strings.HasPrefix(name, dataPrefix) {
			h[name] = values
		}
	}
	f.header, f.values = h, make([]string, 0, n)
	f.set(dataApp, q.Rank.App)
	f.set(dataUnit, q.Rank.Unit)
	f.set(dataRank, q.Rank.ID.String())
	f.set(dataClass, classOf(q, isHold))
	if q.FirstToken > 0 {
		f.duration(dataFirstToken, q.FirstToken)
	}
	if q.Admit != nil {
		f.admit(q.Admit, now)
	}
	if q.IsHeld {
		f.number(dataInc, q.Rank.Incarnation)
	}
	if q.Guard != nil {
		f.set(dataOnce, "1")
		if q.Guard.TimeLeft != nil {
			f.duration(dataWriteBy, q.Guard.TimeLeft())
		}
	}
	if f.isPacked {
		f.isPacked = false
		f.set(dataFields, string(f.packed))
	}
	return h
}

// canBePacked reports that no name holds the character that ends a field.
func canBePacked(q *rankleg.Request) bool {
	return strings.IndexByte(q.Rank.App, ';') < 0 && strings.IndexByte(q.Rank.Unit, ';') < 0 &&
		(q.Admit == nil || strings.IndexByte(q.Admit.Ingress, ';') < 0)
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

// headerWriter sets header fields whose values share one array, or packs them.
type headerWriter struct {
	header   http.Header
	values   []string
	isPacked bool
	packed   []byte
}

func (f *headerWriter) set(name, value string) {
	if f.isPacked {
		f.packed = append(append(append(append(f.packed, name[len(dataPrefix):]...), '='), value...), ';')
		return
	}
	n := len(f.values)
	f.values = append(f.values, value)
	f.header[name] = f.values[n : n+1 : n+1]
}

func (f *headerWriter) number(name string, n uint64) {
	if f.isPacked {
		f.packed = append(append(f.packed, name[len(dataPrefix):]...), '=')
		f.packed = append(strconv.AppendUint(f.packed, n, 10), ';')
		return
	}
	f.set(name, strconv.FormatUint(n, 10))
}

func (f *headerWriter) count(name string, n int) { f.number(name, uint64(max(n, 0))) }

func (f *headerWriter) duration(name string, d time.Duration) {
	f.count(name, int(max(d.Round(time.Millisecond)/time.Millisecond, 1)))
}

func (f *headerWriter) admit(m *msg.Admit, now time.Time) {
	f.set(dataIngress, m.Ingress)
	f.number(dataReq, m.ReqID)
	f.number(dataEpoch, m.Epoch)
	f.count(dataTokens, m.Tokens)
	if m.Estimated {
		f.set(dataEstimated, "1")
	}
	if m.Whole {
		f.set(dataWhole, "1")
	}
	if m.Weight > 1 {
		f.count(dataWeight, m.Weight)
	}
	if len(m.Blocks) > 0 {
		f.count(dataHit, m.Hit)
		f.count(dataHitBlocks, m.HitBlocks)
		f.count(dataBlocks, len(m.Blocks))
	}
	if m.Session != 0 {
		f.number(dataSession, m.Session)
	}
	if !m.Deadline.IsZero() {
		f.duration(dataDeadline, m.Deadline.Sub(now))
	}
}

// headerReader reads fields of a header and keeps the first error.
type headerReader struct {
	header   http.Header
	isPacked bool // the header has dataFields
	packed   [maxPacked]packedField
	n        int // of packed
	err      error
}

// packedField is a field of dataFields. The name has no prefix.
type packedField struct{ name, value string }

// unpack reads dataFields if the header has it.
func (r *headerReader) unpack() {
	v := r.header[dataFields]
	if len(v) == 0 {
		return
	}
	r.isPacked = true
	for rest := v[0]; rest != ""; {
		var field string
		field, rest, _ = strings.Cut(rest, ";")
		name, value, ok := strings.Cut(field, "=")
		if !ok || r.n == maxPacked {
			r.fail(dataFields)
			return
		}
		r.packed[r.n] = packedField{name, value}
		r.n++
	}
}

// find returns a field's value, and how often the field is there.
func (r *headerReader) find(name string) (value string, count int) {
	if !r.isPacked {
		v := r.header[name]
		if len(v) > 0 {
			value = v[0]
		}
		return value, len(v)
	}
	for i := range r.n {
		if f := &r.packed[i]; f.name == name[len(dataPrefix):] {
			value, count = f.value, count+1
		}
	}
	return value, count
}

func (r *headerReader) text(name string) string {
	v, count := r.find(name)
	if count == 1 && v != "" && len(v) <= maxDataName {
		return v
	}
	r.fail(name)
	return ""
}

// number is optional: 0 without the field.
func (r *headerReader) number(name string, bits int) uint64 {
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
func (r *headerReader) count(name string) int { return int(r.number(name, 31)) } //nolint:gosec // 31 bits

func (r *headerReader) duration(name string) time.Duration {
	return time.Duration(r.count(name)) * time.Millisecond
}

func (r *headerReader) fail(name string) {
	if r.err == nil {
		r.err = fmt.Errorf("the field %s is missing or malformed", strings.ToLower(name))
	}
}

// readHead reads the header of a request to path.
func readHead(h http.Header, path string, now time.Time) (*dataHead, error) {
	r := headerReader{header: h}
	r.unpack()
	d := &dataHead{
		app: r.text(dataApp), unit: r.text(dataUnit), class: r.text(dataClass),
		firstToken: r.duration(dataFirstToken), once: r.number(dataOnce, 1) == 1,
		writeBy: r.duration(dataWriteBy),
	}
	var ok bool
	if d.rank, ok = rankleg.ParseRankID(r.text(dataRank)); !ok {
		r.fail(dataRank)
	}
	d.isReset = path == resetPath && d.class == classNone
	if d.class != classHold && !d.isReset {
		d.route = openai.RouteOf(path)
		if d.route == openai.NoRoute || d.route.Method() != http.MethodPost {
			return nil, errors.New("there is no such route")
		}
	}
	switch d.class {
	case classBoth, classHold:
		d.readAdmit(&r, now)
	case classHeld:
		d.incarnation = r.number(dataInc, 64)
	case classNone:
	default:
		r.fail(dataClass)
	}
	if d.blocks > maxDataBlocks || d.admit.HitBlocks > d.blocks {
		r.fail(dataBlocks)
	}
	return d, r.err
}

func (d *dataHead) readAdmit(r *headerReader, now time.Time) {
	d.admit = msg.Admit{
		ReqID: r.number(dataReq, 64), Epoch: r.number(dataEpoch, 64), Tokens: r.count(dataTokens),
		Estimated: r.number(dataEstimated, 1) == 1, Whole: r.number(dataWhole, 1) == 1,
		Weight: r.count(dataWeight),
		Hit:    r.count(dataHit), HitBlocks: r.count(dataHitBlocks), Ingress: r.text(dataIngress),
		Session: r.number(dataSession, 64),
	}
	d.blocks = r.count(dataBlocks)
	if left := r.duration(dataDeadline); left > 0 {
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
