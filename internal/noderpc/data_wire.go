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

	dataRefused = "Dpserve-Refused" // answer: the reason why there is no ticket
	dataCause   = "Dpserve-Cause"   // answer: the reason why there is no answer of the engine
	dataEpoch   = "Dpserve-Epoch"   // of the request, and of an answer
	dataSeq     = "Dpserve-Seq"
	dataTicket  = "Dpserve-Ticket"
	dataInc     = "Dpserve-Incarnation"
	dataResent  = "Dpserve-Resent"
	// with the cause reset, because older nodes read only the cause
	dataMalformed = "Dpserve-Malformed"

	headerRequestID = "X-Request-Id"
)

// holdPath is the path of a request for a ticket alone.
const holdPath = "/dpserve/hold"

// The classes of a request.
const (
	classBoth = "both" // a request and its ticket
	classHold = "hold" // a ticket that lives as long as the stream
	classNone = "none" // a request that needs no ticket
)

// The causes of a data port's own answers.
const (
	causeRefused    = "refused"     // the engine took no connection
	causeReset      = "reset"       // the engine broke off before it answered
	causeFirstToken = "first_token" // its head did not come in time
	causeDenied     = "denied"      // the caller may not send this request
	causeMalformed  = "malformed"
	causeTooLarge   = "too_large"
)

// Bounds of the fields of a request.
const (
	maxDataName   = 512     // bytes of an application's, unit's or ingress's name
	maxDataBlocks = 1 << 20 // chain hashes of a prompt
	hashBytes     = 8
)

// dataHead is the content of a request's header.
type dataHead struct {
	app, unit  string
	rank       routing.RankID
	class      string
	route      openai.Route // NoRoute in classHold
	admit      msg.Admit    // without Ctx, Blocks and Reply; the zero value in classNone
	blocks     int
	firstToken time.Duration // 0: no bound
}

// writeHead writes a request for a rank into the header of its HTTP request. The engine's fields share their
// values with q.
func writeHead(q *rankleg.Request, isHold bool, now time.Time) http.Header {
	h := make(http.Header, len(q.Header)+17)
	for name, values := range q.Header {
		if !strings.HasPrefix(name, dataPrefix) {
			h[name] = values
		}
	}
	f := headerWriter{header: h, values: make([]string, 0, 17)}
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
	return h
}

func classOf(q *rankleg.Request, isHold bool) string {
	switch {
	case isHold:
		return classHold
	case q.Admit == nil:
		return classNone
	default:
		return classBoth
	}
}

// headerWriter sets header fields whose values share one array.
type headerWriter struct {
	header http.Header
	values []string
}

func (f *headerWriter) set(name, value string) {
	n := len(f.values)
	f.values = append(f.values, value)
	f.header[name] = f.values[n : n+1 : n+1]
}

func (f *headerWriter) number(name string, n uint64) { f.set(name, strconv.FormatUint(n, 10)) }

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
	header http.Header
	err    error
}

func (r *headerReader) text(name string) string {
	v := r.header[name]
	if len(v) == 1 && len(v[0]) > 0 && len(v[0]) <= maxDataName {
		return v[0]
	}
	r.fail(name)
	return ""
}

// number is optional: 0 without the field.
func (r *headerReader) number(name string, bits int) uint64 {
	v := r.header[name]
	if len(v) == 0 {
		return 0
	}
	n, err := strconv.ParseUint(v[0], 10, bits)
	if err != nil || len(v) > 1 {
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
	d := &dataHead{
		app: r.text(dataApp), unit: r.text(dataUnit), class: r.text(dataClass),
		firstToken: r.duration(dataFirstToken),
	}
	var ok bool
	if d.rank, ok = rankleg.ParseRankID(r.text(dataRank)); !ok {
		r.fail(dataRank)
	}
	if d.class != classHold {
		d.route = openai.RouteOf(path)
		if d.route == openai.NoRoute || d.route.Method() != http.MethodPost {
			return nil, errors.New("there is no such route")
		}
	}
	switch d.class {
	case classBoth, classHold:
		d.readAdmit(&r, now)
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
		ReqID: r.number(dataReq, 64), Epoch: r.number(dataEpoch, 64),
		Tokens:    r.count(dataTokens),
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
