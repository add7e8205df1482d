package server

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
)

// adminTokenName is the file of the data dir that holds the admin token.
const adminTokenName = "admin.token"

// Bounds of the token that --admin-token-file holds.
const (
	shortestAdminToken = 16
	longestAdminToken  = 512
)

// openAdminToken reads or makes the token that callers of the admin API show. The data dir is this process's
// by then. A node without a data dir has a token that lives as long as the process.
func (n *Node) openAdminToken() (err error) {
	c := &n.cfg
	switch {
	case c.AdminOpen:
		return nil
	case c.AdminTokenFile != "":
		n.access.adminToken, err = readAdminToken(c.AdminTokenFile)
	case c.DataDir == "":
		n.access.adminToken = newAdminToken()
	default:
		if c.AdminTokenFile, err = filepath.Abs(filepath.Join(c.DataDir, adminTokenName)); err != nil {
			return err
		}
		n.access.adminToken, err = keepAdminToken(c.AdminTokenFile)
	}
	return err
}

// keepAdminToken returns the token of a data dir, and makes it at the first start.
func keepAdminToken(path string) (string, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		token := newAdminToken()
		return token, diskfile.Replace(path, []byte(token+"\n"))
	}
	if err == nil && info.Mode().Perm()&0o077 != 0 {
		return "", problem.New(problem.InvalidArgument, "%s can be read by others", path).
			WithHint("delete it, and the node makes another token; or `chmod 600` it, if nobody has read it")
	}
	return readAdminToken(path)
}

func readAdminToken(path string) (string, error) {
	text, err := os.ReadFile(path)
	token := strings.TrimSpace(string(text))
	switch {
	case err != nil:
		return "", problem.New(problem.InvalidArgument, "the admin token cannot be read: %w", err).
			WithHint("name a file with --admin-token-file that this user may read")
	case len(token) < shortestAdminToken || len(token) > longestAdminToken ||
		strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return "", problem.New(problem.InvalidArgument, "%s holds no admin token: want one line of %d to %d "+
			"printable characters", path, shortestAdminToken, longestAdminToken).
			WithHint("make one with `openssl rand -hex 32`")
	}
	return token, nil
}

// newAdminToken draws a token.
func newAdminToken() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24
	return "dpa1." + hex.EncodeToString(b[:])
}

// AdminToken is what a caller of the admin API shows; "" if it is open.
func (n *Node) AdminToken() string { return n.access.adminToken }

// AdminTokenFile is the file that holds the admin token; "" if there is none.
func (n *Node) AdminTokenFile() string {
	if n.access.adminToken == "" {
		return ""
	}
	return n.cfg.AdminTokenFile
}
