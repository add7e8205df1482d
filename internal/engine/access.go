package engine

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// Access is how a node gets into an application's engines: with which API key, and whom it trusts over TLS.
// Keys are read on the node that talks to the engine, and stand in no file of the cluster. Safe for
// concurrent use.
type Access struct {
	forClients bool
	file       string // of the key; "": it never changes
	trust      *tls.Config

	mu      sync.Mutex
	key     string
	looked  time.Time // when the file was last looked at
	version fileVersion
}

// fileVersion tells two contents of a file apart.
type fileVersion struct {
	changed time.Time
	size    int64
}

const (
	keyCheckTime = time.Second // between two looks at a file with a key
	maxKeyBytes  = 16 << 10
)

// AccessTo reads the key and the CA of an application's engines. Errors are problem.InvalidArgument and name
// the key of the file.
func AccessTo(a *app.Application) (*Access, error) {
	e := &a.Engine
	out := &Access{file: e.APIKeyFile, key: APIKey(a), forClients: e.APIKeyEnv != "" || e.APIKeyFile != ""}
	var err error
	switch {
	case e.APIKeyFile != "":
		if out.key, out.version, err = readKey(e.APIKeyFile); err != nil {
			return nil, problem.New(problem.InvalidArgument, "engine.api_key_file: %w", err).
				WithHint("put the engine's API key into that file on the node that talks to the engine")
		}
		out.looked = time.Now()
	case e.APIKeyEnv != "":
		if out.key = strings.TrimSpace(os.Getenv(e.APIKeyEnv)); !isKey(out.key) {
			return nil, problem.New(problem.InvalidArgument,
				"engine.api_key_env: %s is no key in the environment of this node's dpserve", e.APIKeyEnv).
				WithHint("set it where dpserve is started, or write api_key_file")
		}
	}
	if out.trust, err = trustOf(e.TLS); err != nil {
		return nil, err
	}
	return out, nil
}

// Key is what dpserve's own requests to the engine bring; "": the engine asks for none. A file that has
// changed is read again.
func (a *Access) Key() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.file == "" || time.Since(a.looked) < keyCheckTime {
		return a.key
	}
	a.looked = time.Now()
	if is, err := os.Stat(a.file); err != nil || versionOf(is) == a.version {
		return a.key
	}
	if key, version, err := readKey(a.file); err == nil { // else it is being written
		a.key, a.version = key, version
	}
	return a.key
}

// ClientKey is what requests of clients bring to the engine; "": what the client has sent. An engine that
// dpserve starts with a key of its own asks its clients for that key.
func (a *Access) ClientKey() string {
	if !a.forClients {
		return ""
	}
	return a.Key()
}

// Expect sets the name that the certificate of the engine shows; "" = the host of its URL. Call it before the
// first request.
func (a *Access) Expect(name string) {
	switch {
	case name == "":
	case a.trust == nil:
		a.trust = &tls.Config{MinVersion: tls.VersionTLS12, ServerName: name}
	default:
		a.trust.ServerName = name
	}
}

// TLS says whom the node trusts; nil: as the machine does.
func (a *Access) TLS() *tls.Config { return a.trust }

func readKey(path string) (key string, version fileVersion, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", version, err
	}
	defer func() { _ = f.Close() }()
	is, err := f.Stat()
	if err != nil {
		return "", version, err
	}
	text, err := readAll(f, maxKeyBytes)
	if err != nil {
		return "", version, err
	}
	if key = strings.TrimSpace(string(text)); !isKey(key) {
		return "", version, fmt.Errorf("%s is empty, or has more than one line", path)
	}
	return key, versionOf(is), nil
}

func versionOf(is os.FileInfo) fileVersion { return fileVersion{is.ModTime(), is.Size()} }

// isKey reports whether a text can stand in a header field.
func isKey(text string) bool {
	return text != "" && !strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' })
}

func trustOf(t *app.EngineTLS) (*tls.Config, error) {
	if t == nil {
		return nil, nil //nolint:nilnil // no setting is no error
	}
	conf := &tls.Config{
		MinVersion:         tls.VersionTLS12,
		InsecureSkipVerify: t.InsecureSkipVerify, //nolint:gosec // the application's file asks for it
	}
	if t.CA == "" {
		return conf, nil
	}
	text, err := os.ReadFile(t.CA)
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "engine.tls.ca: %w", err).
			WithHint("put the CA's certificate there, on the node that talks to the engine")
	}
	conf.RootCAs = x509.NewCertPool()
	if !conf.RootCAs.AppendCertsFromPEM(text) {
		return nil, problem.New(problem.InvalidArgument, "engine.tls.ca: %s has no certificate", t.CA).
			WithHint("write certificates in PEM form into it")
	}
	return conf, nil
}
