package remote

import (
	"errors"
	"io"
	"sync"
)

// upload is the body of a request to a data port: chain hashes and the engine's body, whose memory belongs to
// the caller of Send. The transport may still read after its round trip has ended, so it reads under a lock,
// and nothing after release.
type upload struct {
	mu         sync.Mutex
	parts      [2][]byte
	isReleased bool
}

var errReleased = errors.New("the request is over")

func (u *upload) size() int { return len(u.parts[0]) + len(u.parts[1]) }

// open returns a reader from the beginning.
func (u *upload) open() (io.ReadCloser, error) { return &uploadReader{upload: u}, nil }

// release ends all reads, so that the memory belongs to the caller again.
func (u *upload) release() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.isReleased, u.parts = true, [2][]byte{}
}

type uploadReader struct {
	upload *upload
	part   int
	at     int // in the part
}

// Read implements io.Reader. It returns io.EOF with the last bytes, so that both are in one HTTP/2 frame.
func (r *uploadReader) Read(p []byte) (n int, err error) {
	u := r.upload
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.isReleased {
		return 0, errReleased
	}
	for r.part < len(u.parts) {
		k := copy(p[n:], u.parts[r.part][r.at:])
		n, r.at = n+k, r.at+k
		if r.at < len(u.parts[r.part]) {
			return n, nil
		}
		r.part, r.at = r.part+1, 0
	}
	return n, io.EOF
}

func (r *uploadReader) Close() error { return nil }
