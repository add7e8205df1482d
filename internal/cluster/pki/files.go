package pki

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
)

// Names of the files below <data-dir>/pki.
const (
	keyFile       = "key.pem"
	certFile      = "cert.pem"
	authorityFile = "ca.pem"
	gossipFile    = "gossip.key"
	signerFile    = "ca.key"
)

// Files are the files of a member.
type Files struct {
	Key       []byte // PEM
	Cert      []byte // PEM
	Authority []byte // PEM
	GossipKey []byte
	// AuthorityKey (PEM) lets a node with role control sign its own certificate when it has expired, because
	// no other node would accept a connection then. nil on other nodes.
	AuthorityKey []byte
}

// namedFile is a file of a member, by its name.
type namedFile struct {
	name string
	data *[]byte
}

// all returns the files in the order in which Save writes them.
func (f *Files) all() []namedFile {
	return []namedFile{
		{keyFile, &f.Key},
		{authorityFile, &f.Authority},
		{gossipFile, &f.GossipKey},
		{signerFile, &f.AuthorityKey},
		{certFile, &f.Cert},
	}
}

// Credentials parses the certificate files.
func (f Files) Credentials() (*Credentials, error) { return NewCredentials(f.Authority, f.Cert, f.Key) }

// Renewed returns the files with a new certificate of the same key and identity. It needs AuthorityKey.
func (f Files) Renewed(now time.Time) (Files, error) {
	old, err := f.Credentials()
	if err != nil {
		return f, err
	}
	a, err := LoadAuthority(f.Authority, f.AuthorityKey)
	if err != nil {
		return f, err
	}
	csr, err := NewCSR(f.Key)
	if err != nil {
		return f, err
	}
	f.Cert, err = a.Sign(csr, old.Identity, now, DefaultLife)
	return f, err
}

// KeepKey reads the key in dir, or makes one and writes it. A node that asks for a certificate again, because
// the first answer was lost, must ask with the same key.
func KeepKey(dir string) (keyPEM []byte, err error) {
	path := filepath.Join(dir, keyFile)
	keyPEM, err = os.ReadFile(path) //nolint:gosec // the data dir
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		if err == nil {
			_, err = parseKey(keyPEM)
		}
		return keyPEM, err
	}
	if keyPEM, err = NewKey(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, unwritableError(dir, err)
	}
	if err := diskfile.Replace(path, keyPEM); err != nil {
		return nil, unwritableError(dir, err)
	}
	return keyPEM, nil
}

// Save writes the files, readable by their owner only. After a crash each file is complete or absent.
// cert.pem comes last: with it the set is complete. A renewal keeps the key, so every mixture of old and new
// files is valid. For another key Save first removes cert.pem.
func Save(dir string, f Files) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return unwritableError(dir, err)
	}
	old, err := os.ReadFile(filepath.Join(dir, keyFile)) //nolint:gosec // the data dir
	if err != nil || !bytes.Equal(old, f.Key) {
		if err := os.Remove(filepath.Join(dir, certFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return unwritableError(dir, err)
		}
	}
	for _, file := range f.all() {
		if file.name == signerFile && len(*file.data) == 0 {
			continue
		}
		if err := diskfile.Replace(filepath.Join(dir, file.name), *file.data); err != nil {
			return unwritableError(dir, err)
		}
	}
	return nil
}

// Load reads the files. Without cert.pem the error is fs.ErrNotExist: this node is no member yet.
func Load(dir string) (Files, error) {
	var f Files
	for _, file := range slices.Backward(f.all()) {
		data, err := os.ReadFile(filepath.Join(dir, file.name)) //nolint:gosec // the data dir
		switch {
		case errors.Is(err, fs.ErrNotExist) && file.name == certFile:
			return Files{}, fmt.Errorf("no certificate in %s: %w", dir, err)
		case errors.Is(err, fs.ErrNotExist) && file.name == signerFile:
			continue
		case err != nil:
			// %v instead of %w: a missing key beside a certificate is damage, not a node that has not joined.
			return Files{}, problem.New(problem.Conflict, "%s cannot be read next to %s: %v", file.name,
				certFile, err).
				WithHint("restore the data dir from a backup, or join again with an empty one")
		}
		*file.data = data
	}
	return f, nil
}

func unwritableError(dir string, err error) error {
	return problem.New(problem.InvalidArgument, "write the node's certificate to %s: %w", dir, err).
		WithHint("choose a --data-dir that you may write to, on a disk with room")
}
