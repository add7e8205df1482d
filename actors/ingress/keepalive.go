package ingress

import (
	"net/http"
	"time"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// keepalives are what a client that waits for a stream hears meanwhile. The fields are the phase timer's
// while the request's goroutine waits for something, and that goroutine's at any other time; the timer's
// mutex hands them over.
type keepalives struct {
	send  func(now time.Time) // sends a comment; bound once
	every time.Duration       // longest silence; 0: the client is left alone
	last  time.Time           // when the client heard something, or the wait began
	isOff bool                // nobody listens on a connection: every stays 0
}

// due is when the client wants to hear something; zero: never.
func (k *keepalives) due() time.Time {
	if k.every == 0 {
		return time.Time{}
	}
	return k.last.Add(k.every)
}

// sendIfDue sends a comment if it is time for one.
func (k *keepalives) sendIfDue(now time.Time) {
	if due := k.due(); !due.IsZero() && !now.Before(due) {
		k.last = now
		k.send(now)
	}
}

// beginKeepalive begins the time after which the client of a stream hears something.
func (req *request) beginKeepalive() {
	k := &req.timer.alive
	if req.scan.Stream && req.route.Generates() && !k.isOff {
		k.every, k.last = req.app.keepalive, time.Now()
	}
}

// sendKeepalive tells a client that waits that its request lives. A client without an answer gets the header
// of a stream first: from then on a failure is an error event. No content has passed, so that another rank
// may still be asked. If it fails, the client's connection is gone, which ends the request.
//
// Nothing is sent inside an event that passes in pieces, nor while the client still sends its request:
// net/http reads the rest of a body before it sends a header.
func (req *request) sendKeepalive(now time.Time) {
	if req.stream.inLongEvent || !req.rest.isWhole() {
		return
	}
	if req.status == 0 && !req.isOpen {
		req.isOpen = true
		h := req.w.Header()
		h["Content-Type"] = []string{"text/event-stream; charset=utf-8"}
		h["Cache-Control"] = []string{"no-cache"}
		h["X-Accel-Buffering"] = unbuffered
		h[headerRequestID], h[headerApp] = req.idHeader, req.app.nameValue
		req.w.WriteHeader(http.StatusOK)
	}
	req.extendWriteDeadline(now)
	_, err := req.w.Write(req.route.Keepalive())
	if err == nil {
		err = req.flush()
	}
	if err != nil {
		req.timer.alive.every = 0
	}
}

// endWithEvent ends a stream with an error event, and cuts the connection, so that the client does not take
// the stream for a complete one.
func (r relay) endWithEvent(event []byte) error {
	r.cutConn = true
	if err := r.writeClient(event, time.Now()); err != nil {
		return err
	}
	return r.flush()
}

// sendErrorEvent sends an engine's error to a client that has the header of a stream.
func (r relay) sendErrorEvent(status int, body []byte) error {
	err := r.endWithEvent(openai.EngineErrorEvent(nil, r.route, status, body))
	if err == nil {
		r.firstByte, r.status = time.Now(), status
	}
	return err
}
